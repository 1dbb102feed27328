"""What a run would take, said before it begins; and what it says when it takes too much."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from pipeline.command_line.option_parsing import in_options
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.streaming import StreamConfig
from pipeline.training import loop, prediction
from pipeline.training.command import main
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from pipeline.training.prediction import (
    count_active_weights,
    count_memory,
    count_operations,
    count_weights,
    step_seconds,
)
from pipeline.training.run_opening import open_training
from pipeline.training.shortage import smaller
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model
from tests.support.runs import require_equal_weights
from tests.support.scored_data import train_config

GIB = 2**30
TINY_LLAMA = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
)


def config_of(root: Path, output: Path, **changes: object) -> TrainConfig:
    return train_config(root, output, method=Method("full"), **changes)


def arguments(config: TrainConfig, *more: str) -> list[str]:
    return [
        *("--data", config.data.path, "--student", config.student, "--output", str(config.output)),
        *("--seq-length", "64", "--global-batch-size", "2", "--micro-batch-size", "2"),
        *("--num-steps", "4", "--warmup-steps", "0", "--learning-rate", "1e-3"),
        *("--schedule", "constant", "--weight-decay", "0", "--device", "cpu", *more),
    ]


@pytest.mark.slow
def test_memory_is_what_an_h200_held(world: Path, tmp_path: Path) -> None:
    """37.1 GiB at most, of 1.1 B parameters and four rows of 2,048 (docs/reference/benchmarks.md).

    That was with an output layer in fp32; recomputed, layers save 24 states of the residual stream.
    Meanwhile autocast keeps a copy of each weight, rounded: 1.8 GiB, which were left out.
    """
    sizes = {"seq_length": 2048, "global_batch_size": 32, "micro_batch_size": 4, "bf16": True}
    config = config_of(world, tmp_path, **sizes)
    found = count_memory(config, TINY_LLAMA, None, 2048)
    assert found.total / GIB == pytest.approx(37.1, rel=0.05)
    less = count_memory(replace(config, gradient_checkpointing=True), TINY_LLAMA, None, 2048)
    rounded = 2 * (count_weights(TINY_LLAMA) - 2 * 32000 * 2048)  # without both vocabularies
    assert less.activations == pytest.approx(24 * 4 * 2048 * 2048 * 4 + rounded, rel=0.02)
    fp32 = replace(config, bf16=False)
    less = count_memory(replace(fp32, gradient_checkpointing=True), TINY_LLAMA, None, 2048)
    a_layer = count_memory(fp32, TINY_LLAMA, None, 2048).activations / 22
    assert less.activations == pytest.approx(24 * 4 * 2048 * 2048 * 4 + a_layer, rel=0.02)
    # 1.44 s a step of a plain loop, 751 TFLOP/s of large products, an arithmetic of 38 %.
    operations = count_operations(config, 1_034_500_000)
    assert step_seconds(operations, 751e12) == pytest.approx(1.44, rel=0.12)


def test_weights_are_counted_without_being_made(world: Path, tmp_path: Path) -> None:
    shape = AutoConfig.from_pretrained(world / "student")
    weights = sum(p.numel() for p in load_language_model(str(world / "student")).parameters())
    found = count_memory(config_of(world, tmp_path), shape, shape, 64)
    assert found.state == 16 * weights
    assert found.teacher > 4 * weights


def test_what_is_counted_is_in_fp32_as_a_run_is(world: Path, tmp_path: Path) -> None:
    """Whatever dtype the configuration names: half the activations were told."""
    for bf16 in (False, True):
        config = config_of(world, tmp_path, bf16=bf16)
        shape = AutoConfig.from_pretrained(world / "student")
        expected = count_memory(config, shape, None, 64)
        shape.dtype = torch.bfloat16
        assert count_memory(config, shape, None, 64) == expected


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "gemma3n_text"])
def test_models_of_other_kinds_are_counted(world: Path, tmp_path: Path, kind: str) -> None:
    """Without sdpa, or with a width for each layer."""
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "gemma3n_text":
        sizes |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]}
    shape = AutoConfig.for_model(kind, **sizes)
    found = count_memory(config_of(world, tmp_path), shape, shape, 64)
    assert found.state == 16 * count_weights(shape)
    assert found.activations > 0 < found.teacher


def test_a_vision_model_s_text_model_is_counted(world: Path, tmp_path: Path) -> None:
    """What draws the vision tower's first weights looks at them, and here are none."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text = {**small, **heads, "vocab_size": 64}
    vision = {**small, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    shape = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    real = AutoModelForCausalLM.from_config(shape)
    assert count_weights(shape) == sum(weight.numel() for weight in real.parameters())
    assert count_memory(config_of(world, tmp_path), shape, shape, 64).activations > 0


def test_a_model_whose_activations_are_not_counted_is_named(world: Path, tmp_path: Path) -> None:
    """It was torch's traceback; this kind of experts needs the numbers themselves."""
    sizes = {"vocab_size": 400, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = AutoConfig.for_model("qwen3_moe", num_experts=2, num_experts_per_tok=1, **sizes)
    shape._experts_implementation = "eager"
    named = r"counts the activations of .* code of Qwen3MoeForCausalLM doesn't allow .* leave out"
    with pytest.raises(ValueError, match=named):
        count_memory(config_of(world, tmp_path), shape, None, 64)


def test_a_model_that_converts_what_it_makes_is_named_too(world: Path, tmp_path: Path) -> None:
    """It was transformers' fault, with another release as the remedy."""
    shape = AutoConfig.for_model("deepseek_v4", vocab_size=400, num_hidden_layers=1)
    named = r"counts the weights of .* code of deepseek_v4 doesn't allow .* swap .*: leave out"
    with pytest.raises(ValueError, match=named):
        count_memory(config_of(world, tmp_path), shape, None, 64)


def test_there_are_no_more_logits_than_tokens_and_vocabulary_make(
    world: Path, tmp_path: Path
) -> None:
    """403 MB were told of a laptop's model."""
    config, shape = config_of(world, tmp_path), AutoConfig.from_pretrained(world / "student")
    most = config.micro_batch_size * config.seq_length * shape.vocab_size
    assert count_memory(config, shape, None, 64).logits == 3 * 4 * most
    assert count_memory(config, shape, shape, 8 * 64).logits == 3 * 4 * 8 * most


def test_only_the_experts_that_are_chosen_take_time() -> None:
    sizes = {"vocab_size": 400, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    one, eight = (
        AutoConfig.for_model("qwen3_moe", num_experts=n, num_experts_per_tok=2, **sizes)
        for n in (2, 8)
    )
    routers = 2 * 32 * (8 - 2)  # which see every expert
    assert count_active_weights(eight) == count_weights(one) + routers < count_weights(eight)


def test_a_dry_run_says_what_a_run_takes_and_writes_nothing(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path / "run")
    assert main(arguments(config, "--method", "full", "--dry-run")) == 0
    told = capsys.readouterr().out
    names = [line[:12].strip() for line in told.splitlines()]
    assert names == ["rows", "steps", "memory", "", "disk", "time"]
    assert "8 of 64 student tokens" in told
    assert "4 of 2 rows: 1 micro-batches of 2 in one process" in told
    assert "cpu has" in told
    assert "it fits" in told
    assert "35 % of" in told
    assert not config.output.exists()
    assert main(arguments(config, "--method", "full", "--dry-run", "--num-steps", "9999")) == 2
    assert "9999 steps need" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["full", "--heldout", "nowhere"], "nowhere"),
        (["alm", "--teacher", "{}/teacher", "--student-bos", "none"], "alm compares .* --stud"),
        (["kld", "--teacher", "{}/teacher"], "kld needs a teacher with the student's tokenizer"),
    ],
)
def test_what_a_run_would_refuse_by_its_data_is_refused_now(
    world: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    message: str,
) -> None:
    asked = ["--method", *(each.format(world) for each in given), "--dry-run"]
    assert main(arguments(config_of(world, tmp_path / "run"), *asked)) == 2
    told = capsys.readouterr()
    assert re.search(message, told.err), told
    assert told.out == ""


def test_other_options_than_the_checkpoints_are_refused_now(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path / "run")
    assert main(arguments(config, "--method", "full", "--exit-after", "1")) == 0
    assert main(arguments(config, "--method", "full", "--seed", "1", "--dry-run")) == 2
    assert "made with --seed 0, this run has 1" in capsys.readouterr().err


def test_the_rate_is_that_of_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs multiply equal ones faster, with less power."""
    made = []

    def timed(work: Callable[[], torch.Tensor], _: torch.device) -> float:
        made.append(work())
        return 0.5

    monkeypatch.setattr(prediction, "_timed", timed)
    assert prediction.measure_matmul(torch.device("cpu"), torch.float32, 8) == 2 * 8**3 / 0.5
    assert len(made[0].unique()) > 1


def test_a_run_that_has_begun_is_the_measure_of_its_own_time(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path / "run")
    config.output.mkdir()
    log = [{"step": step, "seconds": seconds} for step, seconds in enumerate((90, 80, 3, 5, 4), 1)]
    (config.output / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in log))
    assert main(arguments(config, "--method", "full", "--dry-run")) == 0
    told = capsys.readouterr().out
    assert "time        16.0 s, 32 student tokens/s (4 s a step in its log so far)" in told


def test_out_of_memory_names_what_to_lower(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")

    config = config_of(world, tmp_path / "run")
    train(replace(config, output=tmp_path / "begun", exit_after=1))
    monkeypatch.setattr(loop, "train_step", fails)
    again = f"--output {tmp_path / 'begun-2'} --micro-batch-size 1"
    for name, more, hint in (
        ("run", (), "--micro-batch-size 1"),
        ("begun", (), "--gradient-checkpointing"),
        ("begun", ("--gradient-checkpointing",), again),
    ):
        argv = arguments(replace(config, output=tmp_path / name), "--method", "full", *more)
        assert main(argv) == 2
        told = capsys.readouterr().err
        assert "memory is too small for this run (CUDA out of memory. Tried to allocate 2" in told
        assert told.splitlines()[-1] == f"hint: {hint}"


def test_a_cpu_s_lack_of_memory_is_told_like_a_gpu_s(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch has no type of error for it: its traceback was all that a laptop showed."""
    monkeypatch.setattr(loop, "train_step", lambda *_: torch.empty(1 << 50))
    assert main(arguments(config_of(world, tmp_path / "run"), "--method", "full")) == 2
    told = capsys.readouterr().err
    assert "memory is too small for this run ([enforce fail at alloc_cpu.cpp" in told
    assert told.splitlines()[-1] == "hint: --micro-batch-size 1"


def test_a_killed_reader_is_told_in_a_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch raises its end amid a step, from a handler of signals."""

    def fails(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(loop, "train_step", fails)
    assert main(arguments(config_of(world, tmp_path / "run"), "--method", "full")) == 2
    told = capsys.readouterr().err.splitlines()
    assert "reads ahead has ended (DataLoader worker (pid 7) is killed by sig" in told[-2]
    assert told[-1] == "hint: --workers 0"


def test_a_missing_compiler_is_told_in_a_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slim image has none, as our own for training: a hundred lines of torch's were printed."""

    def fails(*_: object) -> None:
        torch.compiler.reset()
        changes = {"cpp.cxx": (None, "no-such-g++"), "force_disable_caches": True}
        with torch._inductor.config.patch(changes):  # type: ignore[attr-defined]
            torch.compile(torch.neg)(torch.ones(3))

    monkeypatch.setattr(loop, "train_step", fails)
    argv = arguments(config_of(world, tmp_path / "run"), "--method", "full", "--compile")
    assert main(argv) == 2
    told = capsys.readouterr().err.splitlines()
    assert "can't compile the student's layers here (InvalidCxxCompiler: No working" in told[-2]
    assert told[-1] == "hint: leave out --compile"


def test_each_shortage_has_another_remedy(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path, micro_batch_size=6, global_batch_size=6)
    found = [smaller(config)]
    for changes in (
        {"micro_batch_size": 1},
        {"gradient_checkpointing": True, "method": Method("teacher"), "teacher": "t"},
        {"method": Method("full"), "teacher": None},
        {"bf16": True},
    ):
        teacher = changes.pop("teacher", None)
        teaching = replace(config.teaching, teacher=teacher)
        config = replace(config, teaching=teaching, **changes)  # type: ignore[arg-type]
        found.append(smaller(config))
    found = [in_options(each, TrainConfig) for each in found]  # as the command prints them
    assert found == [
        "--micro-batch-size 3",
        "--gradient-checkpointing",
        "vocag score, and --stored-losses in place of --teacher",
        "--bf16",
        "--seq-length 32",
    ]


def test_a_run_from_random_weights_needs_a_configuration_alone(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "student").mkdir()
    shutil.copy(world / "student" / "config.json", tmp_path / "student")
    config = config_of(world, tmp_path / "run")
    given = arguments(replace(config, student=str(tmp_path / "student")), "--method", "full")
    assert main([*given, "--dry-run", "--random-init"]) == 0
    assert "memory " in capsys.readouterr().out


def test_random_weights_need_a_configuration_of_any_source(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other models, and in fp32 from the start: a rounded buffer isn't exported."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shape = AutoConfig.for_model("gemma3_text", hidden_size=40, num_hidden_layers=1, vocab_size=400)
    shape.dtype = torch.bfloat16
    shape.save_pretrained(tmp_path / "student")
    config = replace(config_of(world, tmp_path / "run", random_init=True), student="~/student")
    student = loop._first_student(config, torch.device("cpu"))
    assert not isinstance(student, str)
    scale = float(student.get_input_embeddings().embed_scale)
    assert scale == pytest.approx(40**0.5, rel=1e-6)
    with pytest.raises(ValueError, match="no such folder"):
        loop._first_student(replace(config, student="nowhere"), torch.device("cpu"))


def unusable(folder: Path, kind: str) -> Path:
    """Write a student that a run refuses by its shape."""
    if kind == "few rows":
        return write_model(folder, byte_level(400), num_rows=300)
    write_model(folder, byte_level(400))
    if kind != "few positions":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
        ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        shape = sizes | ends if kind == "phi" else {"text_config": sizes | ends}
        AutoConfig.for_model(kind, **shape).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "length", "message"),
    [
        (
            "few positions",
            1024,
            "a row holds 1024 student tokens, .* was made for 512: lower --seq",
        ),
        ("few rows", 64, r"the data holds student token 39\d in document .* rows for 300 tokens"),
        ("phi", 64, "PhiForCausalLM has no output layer, or one with a bias"),
        ("emu3", 64, "Emu3ForCausalLM is saved with the model_type .emu3_text_model., which Auto"),
    ],
)
def test_what_a_run_would_refuse_by_a_model_s_shape_is_refused_now(
    world: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    length: int,
    message: str,
) -> None:
    student = unusable(tmp_path / "student", kind)
    config = replace(config_of(world, tmp_path / "run"), student=str(student))
    given = arguments(config, "--method", "full", "--seq-length", str(length), "--num-steps", "1")
    given += ["--global-batch-size", "1", "--micro-batch-size", "1"]
    assert main([*given, "--dry-run"]) == 2
    assert re.search(message, told := capsys.readouterr().err), told


def test_random_weights_of_a_model_that_could_not_be_loaded_again_are_refused(
    world: Path, tmp_path: Path
) -> None:
    """It was trained, and its model of no use."""
    student = unusable(tmp_path / "student", "emu3")
    config = config_of(world, tmp_path / "run", random_init=True)
    with pytest.raises(ValueError, match=r'the model_type "emu3_text_model", which AutoModelForC'):
        train(replace(config, student=str(student)))


def test_a_quantised_student_is_refused(world: Path) -> None:
    """Its layers would stay as they are, without a word; an adapter's wouldn't."""
    student = load_language_model(str(world / "student"))
    student.hf_quantizer = object()
    with pytest.raises(ValueError, match=r"is quantised, and such weights can't be trained: name"):
        open_training(StreamConfig(str(world / "data"), seq_length=64), student, Method("full"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_are_computed_again_give_the_same_weights(
    world: Path, tmp_path: Path, precision: str
) -> None:
    """And a run may begin without and go on with it."""
    config = config_of(world, tmp_path / "kept", bf16=precision == "bf16")
    again = replace(config, output=tmp_path / "again", gradient_checkpointing=True)
    train(config)
    train(replace(again, gradient_checkpointing=False, exit_after=2))
    train(again)
    require_equal_weights(config.output, again.output)
