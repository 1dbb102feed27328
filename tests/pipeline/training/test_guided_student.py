"""A student whose forward pass is its loss, in what people wrap modules with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import UnknownLogitsError
from pipeline.streaming import AlignedRows, Reading, Rows, StreamConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.run_opening import open_training
from tests.support.killing import run_ranks

# Of all processes' rows together: one process has them all.
METHOD = Method("student_loss", scope="group")


def open_rows(world: Path) -> AlignedRows:
    return AlignedRows(StreamConfig(Reading(str(world / "data")), seq_length=64))


def plain(world: Path, group: dist.ProcessGroup | None = None) -> GuidedStudent:
    return GuidedStudent(load_language_model(str(world / "student")), METHOD, group=group)


def gradients(guided: nn.Module, batch: Rows) -> tuple[float, dict[str, Tensor]]:
    loss = guided(batch)
    loss.loss_sum.backward()
    found = {name: p.grad for name, p in guided.named_parameters() if p.grad is not None}
    return float(loss.loss_sum.detach()), found


def wrap_ddp(guided: GuidedStudent) -> nn.Module:
    return DistributedDataParallel(guided)


def wrap_fsdp(guided: GuidedStudent) -> nn.Module:
    for layer in guided.model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    # Last, so that the output weight is whole while the loss is made.
    return cast(GuidedStudent, fully_shard(guided))


WRAPPERS: dict[str, Callable[[GuidedStudent], nn.Module]] = {"ddp": wrap_ddp, "fsdp": wrap_fsdp}


def run_rank(world: str, folder: str) -> None:
    """Save each wrapper's gradients, whole."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batch = open_rows(Path(world)).__getitems__([2 * rank, 2 * rank + 1])
    found: dict[str, Any] = {}
    for name, wrap in WRAPPERS.items():
        loss, own = gradients(wrap(plain(Path(world), dist.group.WORLD)), batch)
        whole = {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in own.items()}
        found[name] = loss, {key.removeprefix("module."): g for key, g in whole.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ddp_and_fsdp_give_the_gradients_of_one_process(world: Path, tmp_path: Path) -> None:
    run_ranks(run_rank, str(world), str(tmp_path))
    guided = plain(world)
    loss, expected = gradients(guided, open_rows(world).__getitems__([0, 1, 2, 3]))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert len(expected) == 20
    for name in WRAPPERS:
        assert sum(rank[name][0] for rank in ranks) == pytest.approx(loss, rel=3e-6)
        for rank in ranks:
            assert rank[name][1].keys() == expected.keys()
            for key, gradient in expected.items():
                # Wrappers average over the processes.
                torch.testing.assert_close(2 * rank[name][1][key], gradient, rtol=1e-4, atol=1e-5)


def test_adapters_of_peft_learn_and_nothing_else(world: Path) -> None:
    peft = pytest.importorskip("peft")
    student = load_language_model(str(world / "student"))
    batch = open_rows(world).__getitems__([0, 1])
    adapted = peft.get_peft_model(student, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    guided = GuidedStudent(adapted, METHOD)
    before, found = gradients(guided, batch)
    assert before == pytest.approx(gradients(plain(world), batch)[0], rel=1e-6), "B starts at 0"
    assert found
    assert all("lora_" in name for name in found)
    torch.optim.SGD(guided.parameters(), lr=0.1).step()
    # The loss sees the adapter: around the inner model it would have stayed.
    assert gradients(guided, batch)[0] < before
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prompted = peft.get_peft_model(load_language_model(str(world / "student")), prompts)
    with pytest.raises(ValueError, match="puts learned prompts before a text"):
        GuidedStudent(prompted, METHOD)


@pytest.mark.parametrize(
    "where",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [5, 6]}},
    ],
    ids=str,
)
def test_adapters_are_in_the_loss_or_refused(world: Path, where: dict[str, Any]) -> None:
    """LoRA of the output layer got no gradient, without a word."""
    peft = pytest.importorskip("peft")
    student = load_language_model(str(world / "student"))
    adapted = peft.get_peft_model(student, peft.LoraConfig(**where))
    if "lm_head" in where["target_modules"]:
        for model in (adapted, student):  # around the model, or only in it
            with pytest.raises(UnknownLogitsError, match="an adapter in its output layer, of"):
                open_training(StreamConfig(str(world / "data")), model, Method("full"))
        return
    learned = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    for each in learned.values():
        each.data.add_(torch.randn_like(each) / 20)  # adapters begin with nothing
    batch = open_rows(world).__getitems__([0])
    loss, found = gradients(GuidedStudent(adapted, Method("full")), batch)
    assert len(found) == len(learned)
    given = {"input_ids": batch["input_ids"].long(), "position_ids": batch["position_ids"].long()}
    logits = adapted(**given, use_cache=False).logits[0]
    own = torch.nn.functional.cross_entropy(logits, batch["labels"][0].long(), reduction="none")
    assert loss == pytest.approx(float((own * batch["loss_mask"][0]).sum().detach()), rel=1e-5)


@pytest.mark.parametrize("name", ["teacher", "uld"])
def test_rows_without_a_teacher_are_told_what_to_give(world: Path, name: str) -> None:
    guided = GuidedStudent(load_language_model(str(world / "student")), Method(name))
    with pytest.raises(ValueError, match=f"method={name} finds no teacher_losses .* teacher="):
        guided(open_rows(world).__getitems__([0]))


@pytest.mark.parametrize("name", ["full", "teacher", "uld"])
def test_a_batch_without_labels_teaches_nothing(world: Path, name: str) -> None:
    student, teacher = (load_language_model(str(world / side)) for side in ("student", "teacher"))
    batch = open_rows(world).__getitems__([0])
    batch["loss_mask"].zero_()
    loss = GuidedStudent(student, Method(name))(batch, teacher=teacher)
    assert (float(loss.loss_sum), int(loss.num_tokens)) == (0.0, 0)


def test_torch_compile_reaches_the_model(world: Path) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    batch = open_rows(world).__getitems__([0, 1])
    loss, expected = gradients(plain(world), batch)
    guided = plain(world)
    found, own = gradients(torch.compile(guided, backend=count), batch)  # type: ignore[arg-type]
    linear = sum("linear" in str(node.target) for g in graphs for node in g.graph.nodes)
    assert linear >= 7, "a layer's products are in the compiled graphs; all layers share them"
    assert found == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(own[f"_orig_mod.{name}"], gradient, rtol=1e-3, atol=1e-4)
