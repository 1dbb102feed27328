"""The examples of the loss in other people's trainers."""

import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import accelerate_loop
import fsdp2_loop
import hf_trainer
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.multiprocessing import ProcessExitedException
from transformers import AutoModelForCausalLM

from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.training.guided import GuidedStudent
from pipeline.training.loop import train
from tests.support.killing import run_ranks
from tests.support.runs import read_log
from tests.support.scored_data import SEQ_LENGTH, run_score, train_config, write_world
from tests.support.servers import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


# As torchrun starts them, but for one start-up of both.
_TWO_RANKS = """
import os, sys
import accelerate_loop
child = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
accelerate_loop.main(sys.argv[1:])
if child and os.waitpid(child, 0)[1]:
    raise SystemExit("rank 1 failed")
"""


def loop_arguments(world: Path, output: Path) -> list[str]:
    sizes = "--seq-length 64 --num-steps 3 --global-batch-size 4 --micro-batch-size 1"
    paths = ["--data", str(world / "data"), "--student", str(world / "student")]
    return [*paths, "--output", str(output), *sizes.split(), "--learning-rate", "1e-3"]


def shown(page: str, marker: str, changes: dict[str, str]) -> str:
    """Return the first Python block of a page that has the marker, with changes."""
    text = (EXAMPLES.parent / "docs" / page).read_text("utf-8")
    blocks = (block.split("```")[0] for block in text.split("```python\n")[1:])
    code = next(block for block in blocks if marker in block)
    for there, here in changes.items():
        assert there in code
        code = code.replace(there, here)
    return code


def own_names(world: Path) -> dict[str, str]:
    """Return a world's names for those of a page."""
    return {
        '"TinyLlama/TinyLlama_v1.1"': repr(str(world / "student")),
        '"aligned"': repr(str(world / "data")),
        '"Qwen/Qwen2.5-Math-7B"': '""',
        "seq_length=2048": f"seq_length={SEQ_LENGTH}",
    }


@pytest.fixture(scope="module")
def alone(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and student of the accelerate loop in one process."""
    student = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        return accelerate_loop.main(loop_arguments(world, student)), student


def test_the_accelerate_loop_trains_as_vocag_train_does(
    world: Path, tmp_path: Path, alone: tuple[list[float], Path]
) -> None:
    found, student = alone
    method = {"stored_losses": "teacher", "method": Method("teacher", scope="row")}
    sizes = {"global_batch_size": 4, "micro_batch_size": 1, "num_steps": 3}
    train(train_config(world, tmp_path / "run", **method, **sizes))
    records = read_log(tmp_path / "run")
    assert found == pytest.approx([record["loss"] for record in records], rel=3e-6)
    assert found[2] != found[0]
    saved, own = weights(student), weights(tmp_path / "run/model")
    for name, tensor in own.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-5)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (student / name).read_bytes() == (tmp_path / "run/model" / name).read_bytes()


def test_the_accelerate_loop_bears_steps_that_keep_no_token(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    nothing = Method("teacher", keep_fraction=1e-6, unmapped="exclude")
    monkeypatch.setattr("vocag.Method", lambda *_, **__: nothing)
    assert accelerate_loop.main(loop_arguments(world, tmp_path)) == [0.0] * 3
    before, after = weights(world / "student"), weights(tmp_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_more_steps_than_the_data_have_are_refused_before_the_first(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They ended in a bare StopIteration, and no model was kept."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    small = {'"cuda", 1000, 64, 4': '"cpu", 9999, 4, 1'} | own_names(world)
    for start in (
        lambda: accelerate_loop.main([*loop_arguments(world, tmp_path), "--num-steps", "9999"]),
        lambda: exec(shown("guides/your_trainer.md", "", small), {}),
    ):
        with pytest.raises(ValueError, match=r"num_samples 39996 is more than the \d+ rows"):
            start()
    assert "step 1" not in capsys.readouterr().out


def test_the_first_example_of_the_streaming_page_runs(world: Path) -> None:
    """It crashed on a model of transformers."""
    small = {
        '"aligned"': repr(str(world / "data")),
        "seq_length=2048, global_batch_size=64": f"seq_length={SEQ_LENGTH}, global_batch_size=4",
        "num_workers=2": "num_workers=0",
    }
    student = AutoModelForCausalLM.from_pretrained(world / "student")
    names: dict[str, Any] = {"student": student}
    exec(shown("concepts/rows.md", "", small), names)
    guided = GuidedStudent(load_language_model(str(world / "student")), Method("full"))
    expected = guided(names["batch"])
    mean = float(expected.loss_sum.detach() / expected.num_tokens)
    assert float(names["loss"].detach()) == pytest.approx(mean, rel=1e-5)


def test_the_plain_loop_of_the_page_is_the_accelerate_loop(
    world: Path,
    tmp_path: Path,
    alone: tuple[list[float], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {'"cuda", 1000, 64, 4': '"cpu", 3, 4, 1', "lr=8e-5": "lr=1e-3"} | own_names(world)
    exec(shown("guides/your_trainer.md", "", small), {})
    losses, student = alone
    expected = [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses, start=1)]
    assert capsys.readouterr().out.splitlines() == expected
    own = weights(tmp_path / "student")
    for name, tensor in weights(student).items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_accelerate_loop_in_two_processes_is_the_same(
    world: Path, tmp_path: Path, alone: tuple[list[float], Path]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _TWO_RANKS, *loop_arguments(world, tmp_path / "two")],
        env=os.environ
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    expected = [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(alone[0], start=1)]
    assert [line for line in ended.stdout.splitlines() if line.startswith("step")] == expected
    two = weights(tmp_path / "two")
    for name, tensor in weights(alone[1]).items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


def shard_and_train(world: Path, output: Path, die: bool) -> None:
    """Be one rank of the FSDP2 loop; rank 0 may die when the second checkpoint is complete but for
    its last file."""
    finish, calls = FileSystemWriter.finish, []

    def counted(*given: Any, **options: Any) -> None:
        calls.append(given)
        if die and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(*given, **options)

    arguments = loop_arguments(world, output)
    arguments[arguments.index("--learning-rate")] = "--lr"
    arguments += ["--checkpoint-every", "1", "--num-steps", "4"]
    with pytest.MonkeyPatch.context() as patch, Path(f"{output}.txt").open("a") as printed:
        patch.setattr(FileSystemWriter, "finish", counted)
        patch.setattr(sys, "argv", ["fsdp2_loop.py", *arguments])
        with redirect_stdout(printed):
            fsdp2_loop.main()


def printed_losses(path: Path) -> list[tuple[int, float]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("step ")]
    parts = [line.removeprefix("step ").split(": loss ") for line in lines]
    return [(int(step), float(loss)) for step, loss in parts]


@pytest.mark.slow
def test_the_fsdp2_loop_trains_as_vocag_train_does_and_continues(
    world: Path, tmp_path: Path
) -> None:
    run_ranks(shard_and_train, world, tmp_path / "whole", False)
    method = {"stored_losses": "teacher", "method": Method("teacher", scope="row")}
    sizes = {"global_batch_size": 4, "micro_batch_size": 1, "num_steps": 4}
    train(train_config(world, tmp_path / "run", **method, **sizes))
    records = read_log(tmp_path / "run")
    losses = dict(printed_losses(tmp_path / "whole.txt"))
    assert losses == pytest.approx({r["step"]: r["loss"] for r in records}, rel=3e-6)
    whole, own = weights(tmp_path / "whole/model"), weights(tmp_path / "run/model")
    for name, tensor in own.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-3, atol=1e-5)
    tokenizers = [tmp_path / name / "model/tokenizer.json" for name in ("whole", "run")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()

    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(shard_and_train, world, tmp_path / "killed", True)
    assert (tmp_path / "killed/step-00000001/.metadata").exists()
    assert (tmp_path / "killed/step-00000002").exists()
    assert not (tmp_path / "killed/step-00000002/.metadata").exists()
    run_ranks(shard_and_train, world, tmp_path / "killed", False)
    again = printed_losses(tmp_path / "killed.txt")
    assert [step for step, _ in again] == [1, 2, 2, 3, 4]
    assert dict(again) == losses
    killed = weights(tmp_path / "killed/model")
    assert all(torch.equal(killed[name], tensor) for name, tensor in whole.items())


def test_what_the_trainer_s_example_refuses_is_a_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Data that nothing has scored ended it in a traceback."""
    words = ["--data", str(world / "data"), "--student", str(world / "student")]
    words += ["--method", "teacher", "--stored_losses", "nobody", "--use_cpu", "True"]
    monkeypatch.setattr(sys, "argv", ["hf_trainer", *words, "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "hf_trainer.py"), run_name="__main__")
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith('hf_trainer.py: there are no scores by teacher "nobody"'), said
    assert said[-1].startswith("hint: ")


def test_examples_are_short() -> None:
    for name in ("accelerate_loop", "fsdp2_loop"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 85, name


@pytest.mark.parametrize(
    "method", [("--method", "teacher", "--stored_losses", ""), ("--method", "full")], ids=" ".join
)
def test_the_hugging_face_example_leaves_a_student(
    world: Path, tmp_path: Path, method: tuple[str, ...]
) -> None:
    """`GuidedTrainer` has tests of its own."""
    hf_trainer.main(
        [
            *("--data", str(world / "data"), "--student", str(world / "student")),
            *(*method, "--heldout", str(world / "data")),
            *("--eval_strategy", "steps", "--eval_steps", "2"),
            *("--output_dir", str(tmp_path / "run"), "--seq_length", str(SEQ_LENGTH)),
            *["--max_steps", "2", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"],
            *["--logging_steps", "1", "--use_cpu", "True", "--report_to", "none"],
        ]
    )
    state = json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())
    names = {name for entry in state["log_history"] for name in entry}
    assert names >= {"loss", "kept_fraction", "eval_loss", "eval_bits_per_byte"}
    before, after = weights(world / "student"), weights(tmp_path / "run")
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-3


def test_the_page_shows_lines_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = write_world(tmp_path / "world")
    run_score(world, "--top-k", "4")
    small = own_names(world) | {
        '"heldout"': repr(str(world / "data")),
        "max_steps=1000": "max_steps=1, use_cpu=True, report_to='none'",
    }
    exec(shown("guides/your_trainer.md", "GuidedTrainer(", small), {})
    assert (tmp_path / "runs/trainer/model.safetensors").is_file()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()
