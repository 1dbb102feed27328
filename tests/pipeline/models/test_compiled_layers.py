"""torch.compile of a model's layers, with documents kept apart by one kernel."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.methods.method import Method
from pipeline.models import varlen
from pipeline.models.packed_attention import PACKED_ATTENTION, packed_arguments, register
from pipeline.training.loop import train
from tests.support.scored_data import train_config

SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.skipif(bool(varlen.missing_kernel()), reason="this torch has no such kernel")
def test_attention_by_torchs_kernel_leaves_a_graph_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, because the kernel needs a GPU; forward and backward."""
    register()
    monkeypatch.setattr(varlen, "fits_kernel", lambda *_: True)
    monkeypatch.setattr(varlen, "why_not_cudnn", lambda *_: None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # unknown of "meta"
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SIZES)
        ).bfloat16()
    model.set_attn_implementation(PACKED_ATTENTION)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model.base_model, backend=keep, fullgraph=True)
    for length in (20, 7, 2):  # 8, 20 and 64 documents, in bounds of 33, 33 and 65
        places = torch.arange(64).remainder(length).expand(2, 64)
        more = packed_arguments(model, places)
        moved = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in more.items()}
        ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
        given = {"position_ids": places.to("meta"), "use_cache": False, **moved}
        states = compiled(input_ids=ids, **given).last_hidden_state
        assert states.shape == (2, 64, 64)
    kernels = [node for node in graphs[0].graph.nodes if "varlen_attn" in str(node.target)]
    assert len(kernels) == SIZES["num_hidden_layers"]
    assert len(graphs) <= 2, "another number of documents needs a graph once, and then none"


def test_a_compiled_student_learns_the_same(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.nn.Module] = []

    def compile_module(module: torch.nn.Module) -> None:
        compiled.append(module)
        module._compiled_call_impl = torch.compile(  # type: ignore[assignment]
            module._call_impl, backend="aot_eager"
        )

    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    plain = train_config(world, tmp_path / "plain", method=Method("full"), num_steps=2)
    own = train(plain)
    assert not compiled
    found = train(replace(plain, output=tmp_path / "compiled", compile=True))
    assert [type(module).__name__ for module in compiled] == ["LlamaModel"]
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-5)
