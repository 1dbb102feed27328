"""benchmarks/gpu.py on a CPU, small: every part that needs no compiler and no Megatron."""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gpu
import gpu_results
import gpu_world
import pytest
from gpu_parts import PARITY, Bench, gpu_tests

from pipeline.models import running_teacher
from pipeline.training import loop

RUN_BY_OTHERS = {"tests", "parity"}
COMPILED = {"plain_compiled", "full_compiled"}


def options_of(work: Path, *parts: str, minutes: float = 60) -> argparse.Namespace:
    return argparse.Namespace(work=work, only=parts, minutes=minutes, device="cpu", small=True)


def test_a_failed_part_says_why_in_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(options: argparse.Namespace, part: str, _: float) -> str:
        (options.work / f"{part}.log").write_text("loading 10 %\rloading 99 %\r\n\nNo driver\n")
        return "failed with status 1"

    monkeypatch.setattr(gpu, "_run_part", fails)
    assert gpu.run_parts(options_of(tmp_path, "matmul")) == {"matmul"}
    found = gpu_results.read_results(tmp_path)["matmul"]
    assert found["log"] == "loading 10 %\nloading 99 %\nNo driver"
    assert found["status"] == "failed with status 1"
    monkeypatch.setattr(gpu, "_run_part", lambda *_: "done")
    assert not gpu.run_parts(options_of(tmp_path, "matmul"))
    assert not gpu_results.read_results(tmp_path)["matmul"]["log"]


def test_a_part_measures_the_checkout_that_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vocag installed all parts failed; with another checkout's, that one was measured."""
    started = []

    class Started:
        def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
            started.append(env["PYTHONPATH"].split(os.pathsep))

        def wait(self, _: float) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Started)
    for given, kept in (("", []), ("site", ["site"])):
        monkeypatch.setenv("PYTHONPATH", given)
        assert not gpu.run_parts(options_of(tmp_path, "matmul"))
        assert started.pop() == [str(Path(__file__).resolve().parents[2]), *kept]


@pytest.mark.slow
def test_what_a_part_starts_prints_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('so far', flush=True); sys.stderr.write('no driver'); sys.exit(3)"
    found = gpu_results.run_and_print([sys.executable, "-c", code])
    assert found == (3, "so far\nno driver")
    assert capsys.readouterr().out == "so far\nno driver"


def test_a_model_whose_part_was_stopped_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Path) -> None:
        raise KeyboardInterrupt

    (tmp_path / "student.json").write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copy", stop)
        with pytest.raises(KeyboardInterrupt):
            gpu_world.make_model(tmp_path, "student", gpu_world.SMALL, "cpu")
    assert not (tmp_path / "student").exists()
    folder = gpu_world.make_model(tmp_path, "student", gpu_world.SMALL, "cpu")
    assert {"config.json", "tokenizer.json"} < {path.name for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["student"]


def test_the_tests_of_a_gpu_are_found() -> None:
    """By their files: of a whole folder, some can't be imported where the least is installed."""
    found = gpu_tests()
    assert PARITY in found
    names = {path.name for path in found}
    assert {"test_attention.py", "test_cross_entropy.py", "test_varlen.py"} < names
    assert "test_likelihood_matching.py" not in names


def test_a_checkout_that_is_not_installed_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def not_installed(name: str) -> str:
        if name == "vocag":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    Bench(tmp_path, "cpu", small=True).matmul()
    assert "vocag from a checkout" in gpu_results.read_results(tmp_path)["matmul"]["machine"]


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_notes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in (
        (running_teacher, "require_trained"),
        (loop, "_keep_checkpoint"),
        (loop, "_keep_model"),
        (loop, "train_step"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    bench = Bench(tmp_path, "cpu", small=True)
    for part in gpu.LIMITS:
        if part in RUN_BY_OTHERS | COMPILED:
            continue
        getattr(bench, part)()
    found = gpu_results.read_results(tmp_path)
    assert found["data"]["vocabulary"] == {"student": 400, "teacher": 480}  # as many as asked for
    for part in ("plain", "full", "teacher", "distill", "alm", "running"):
        assert found[part]["step"] > 0
        assert found[part]["tokens_s"] > 0
    assert all(loss > 0 for loss in found["distill"]["losses"])
    assert set(found["score"]["of_bare"]) == {"losses", "top8_draws4"}
    assert len(found["profile"]["shares"]) == 10
    assert "step" not in found["profile"]  # profiling slows its steps
    table = "\n".join(gpu.table(found))
    assert "| full | " in table
    assert "| 1.03 | " in table
    assert "- score: {" in table


@pytest.mark.slow
def test_a_part_has_a_process_and_a_limit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.LIMITS, "matmul", 0.02)
    assert gpu.run_parts(options_of(tmp_path, "matmul", "profile", minutes=0.084)) == {"matmul"}
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["part"], line["status"][:10]) for line in lines] == [
        ("matmul", "stopped af"),
        ("data", "no time le"),
        ("profile", "no time le"),
    ]
