"""Data parallel under torchrun: the same rows, choices and losses as one process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from pipeline.streaming import AlignedRows
from pipeline.training.command import main, parse_config
from pipeline.training.loop import train
from pipeline.training.ranks import Ranks, joined_ranks
from pipeline.training.stopping import RunStoppedError
from tests.support.killing import run_ranks
from tests.support.runs import read_log, weights_of

CHOSEN = "--distill-tokens kept --distill-by student_entropy --scope row"


def arguments(world: Path, output: Path, *more: str) -> list[str]:
    fixed = "--seq-length 64 --global-batch-size 4 --micro-batch-size 1 --num-steps 4"
    return [
        *("--data", str(world / "data"), "--student", str(world / "student"), "--device", "cpu"),
        *("--heldout", str(world / "data"), "--evaluate-every", "2", "--output", str(output)),
        *(*fixed.split(), *["--warmup-steps", "1", "--learning-rate", "1e-3"], *more),
    ]


def torchrun(arguments: Sequence[str]) -> None:
    repository = Path(__file__).parents[3]
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m pipeline.training"
    ended = subprocess.run(
        [sys.executable, *launcher.split(), *arguments],
        cwd=repository,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("step 1:") == 1, "one process writes the log"


def forked(arguments: Sequence[str]) -> None:
    run_ranks(run_rank, arguments)


def run_rank(arguments: Sequence[str]) -> None:
    """Train; the teacher is untrained here, and the check that asks accepts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.models.running_teacher.require_trained", lambda *_, **__: None)
        assert main(arguments) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "teacher", "more", "start"),
    [
        ("random", None, "", torchrun),
        ("distill", "stored", "", forked),
        ("distill", "online", "", forked),
        # Draws, and a share of the labels.
        ("distill", "stored", CHOSEN, forked),
        ("distill", "online", f"{CHOSEN} --top-k 4 --draws 3", forked),
    ],
)
def test_two_processes_train_as_one_does(
    drawn: Path,
    taught: Path,
    tmp_path: Path,
    method: str,
    teacher: str | None,
    more: str,
    start: Callable[[Sequence[str]], None],
) -> None:
    """Two processes for two steps, one for the rest, against one all the way."""
    world, options = drawn if more else taught, ["--method", method, *more.split()]
    options += ["--stored-losses", ""] if teacher == "stored" else []
    options += ["--teacher", str(world / "teacher")] if teacher == "online" else []
    # accelerate's trackers ask for the processes too.
    options += ["--tracker", "tensorboard"] if start is torchrun else []
    run_rank(arguments(world, tmp_path / "one", *options))
    start(arguments(world, tmp_path / "two", *options, "--exit-after", "2"))
    run_rank(arguments(world, tmp_path / "two", *options))
    one, two = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    assert [record["step"] for record in two] == [1, 2, 3, 4]
    for expected, found in zip(one, two, strict=True):
        assert found.keys() == expected.keys()
        assert found["num_counted_tokens"] == expected["num_counted_tokens"]
        for name in (key for key, value in expected.items() if value is not None):
            if name == "seconds":
                continue
            assert found[name] == pytest.approx(expected[name], rel=3e-6), name
    weights = [weights_of(tmp_path / run) for run in ("one", "two")]
    initial = load_file(world / "student/model.safetensors")
    for key in initial:
        torch.testing.assert_close(weights[1][key], weights[0][key], rtol=1e-3, atol=1e-5)
    assert any((weights[0][key] - initial[key]).abs().max() > 1e-3 for key in initial)
    assert len(list((tmp_path / "two").glob("events.*"))) == (2 if start is torchrun else 0)


@pytest.mark.slow
def test_one_process_s_error_is_the_only_one_told(world: Path, tmp_path: Path) -> None:
    """The others said it with a traceback of gloo's."""
    given = arguments(world, tmp_path / "run", "--method", "full")
    run_ranks(run_failing_rank, given, tmp_path)
    assert "process 1: sample 7 is damaged" in (tmp_path / "1.txt").read_text()
    lost = "vocag train, process 0: another process has ended; its message says why\n"
    assert (tmp_path / "0.txt").read_text().endswith(lost)


def run_failing_rank(arguments: Sequence[str], folder: Path) -> None:
    """Train, with data that only the second process can't read from its second row on."""
    rank, read, calls = os.environ["RANK"], AlignedRows.read_into, []

    def fails(*given: Any) -> None:
        calls.append(given)
        if rank == "1" and len(calls) > 1:
            raise ValueError("sample 7 is damaged")
        read(*given)

    with (folder / f"{rank}.txt").open("w") as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignedRows, "read_into", fails)
        with redirect_stderr(told):
            assert main(arguments) == 2


@pytest.mark.slow
def test_text_reaches_only_a_part_of_a_multimodal_student(world: Path, tmp_path: Path) -> None:
    """Whose vision gets no gradient: the second step ended in a traceback."""
    shape = AutoConfig.from_pretrained(world / "student")
    text = {"vocab_size": shape.vocab_size, "max_position_embeddings": 512, "head_dim": 8}
    text |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    student = tmp_path / "student"
    shutil.copytree(world / "student", student, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_config(config).save_pretrained(student)
    given = ("--method", "full", "--student", str(student))
    run_rank(arguments(world, tmp_path / "one", *given))
    forked(arguments(world, tmp_path / "two", *given))
    losses = [[step["loss"] for step in read_log(tmp_path / run)] for run in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=3e-6)


@pytest.mark.slow
def test_a_group_chooses_at_random_as_one_process_does(world: Path, tmp_path: Path) -> None:
    chosen = ("--method", "random", "--scope", "group")
    run_rank(arguments(world, tmp_path / "one", *chosen, "--micro-batch-size", "2"))
    forked(arguments(world, tmp_path / "two", *chosen))
    one, two = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], rel=3e-6)


def test_a_batch_that_processes_can_t_share_is_refused(world: Path, tmp_path: Path) -> None:
    config = parse_config(arguments(world, tmp_path, "--method", "full", "--micro-batch-size", "4"))
    with pytest.raises(ValueError, match="4 isn't a multiple of 8, micro_batch_size=4 by 2 proc"):
        train(config, Ranks(torch.device("cpu"), 0, 2))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "^WORLD_SIZE is 4, but LOCAL_RANK isn't set, .* this machine's 2 GPUs .* torchrun"),
        ({"LOCAL_RANK": "2"}, r"^LOCAL_RANK is 2, but torch sees 2 GPUs .* --nproc-per-node 2\)"),
    ],
)
def test_a_process_without_a_gpu_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], message: str
) -> None:
    """A KeyError, or CUDA's "invalid device ordinal", with a traceback from each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {"WORLD_SIZE": "4", "RANK": "2", **told}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message), joined_ranks(""):
        pass


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (ValueError("bad"), False),
        (KeyboardInterrupt(), False),
        (RunStoppedError(3, None), True),
    ],
    ids=str,
)
def test_a_process_that_ends_alone_waits_for_no_other(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, waits: bool
) -> None:
    """To leave the group of NCCL waits for all others, which wait for this process."""
    left: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(None))
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(type(error)), joined_ranks(""):
        raise error
    assert bool(left) == waits
