"""benchmarks/gpu.py on a CPU, small: every part that needs no compiler and no Megatron."""

import argparse
import json
from pathlib import Path

import gpu
import pytest
from gpu_parts import Bench

from pipeline.models import running_teacher
from pipeline.training import loop

RUN_BY_OTHERS = {"tests", "parity"}
COMPILED = {"plain_compiled", "full_compiled"}


def options_of(work: Path, *parts: str, minutes: float = 60) -> argparse.Namespace:
    return argparse.Namespace(work=work, only=parts, minutes=minutes, device="cpu", small=True)


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
    found = gpu.read_results(tmp_path)
    for part in ("plain", "full", "teacher", "distill", "alm", "running"):
        assert found[part]["step"] > 0
        assert found[part]["tokens_s"] > 0
    assert all(loss > 0 for loss in found["distill"]["losses"])
    assert set(found["score"]["of_bare"]) == {"losses", "top8_draws4"}
    assert len(found["profile"]["shares"]) == 10
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
