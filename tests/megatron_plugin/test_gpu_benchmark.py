"""The GPU benchmark's commands, as far as they can be checked without a GPU."""

import os
import subprocess
import sys
from argparse import ArgumentParser

import pytest

pytest.importorskip("megatron.core")

from megatron_prediction import Plan, predict

from beam_jobs.score.options import parse_options
from benchmarks import megatron_gpu
from megatron_plugin.arguments import add_arguments, read_options
from megatron_plugin.models.shape import read_shape
from pipeline.command_line.options import parse_options as parse_plan
from tests.megatron_plugin.forked_ranks import ROOT
from tests.megatron_plugin.models import save_model
from tests.support.datasets import build_dataset

SCRIPT = ROOT / "benchmarks/megatron_gpu.sh"
TRAINER = "megatron_plugin.pretrain_gpt"
# Stands in for Python and notes what it would have run.
RECORDER = """#!/bin/sh
{ for argument; do printf '%s\\0' "$argument"; done; printf '\\n'; } >> "$RECORD"
"""


@pytest.fixture(params=[2, 8], ids="{} GPUs".format)
def commands(request, tmp_path):
    """Return the arguments of every command of a whole benchmark."""
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    record = tmp_path / "commands"
    environment = os.environ | {"PYTHON": str(python), "RECORD": str(record), "STEPS": "3"}
    environment |= {"GPUS": str(request.param), "ENGINE": "1"}
    subprocess.run([SCRIPT, tmp_path / "work"], check=True, env=environment, cwd=ROOT)
    return [line.split("\0")[:-1] for line in record.read_text().splitlines()]


def test_every_run_has_arguments_that_work(commands):
    from megatron.training.arguments import add_megatron_arguments

    runs, steps = [], []
    for argv in (line[line.index(TRAINER) + 1 :] for line in commands if TRAINER in line):
        parser = add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        known, unknown = parser.parse_known_args(argv)
        assert unknown == []
        steps.append(known.train_iters)
        runs.append(read_options(argv))
    assert steps == [6, 6] + 8 * [3]
    (eight_or_two,) = {int(line[-1]) for line in commands if "table" in line}
    assert [run.teacher.world_size for run in runs if run.teaching.teacher] == [
        0,
        eight_or_two // 2,
    ]
    assert {run.kind.selector for run in runs} == {"full", "random", "teacher"}


def test_it_predicts_before_it_measures(commands):
    (predicted,) = (line for line in commands if "--predict" in line)
    assert commands.index(predicted) < min(n for n, line in enumerate(commands) if TRAINER in line)
    argv = [argument for argument in predicted[1:] if argument != "--predict"]
    plan = parse_plan(Plan, argv, prog="megatron_gpu.py")
    assert plan.global_batch_size == megatron_gpu.ROWS_PER_STEP
    assert plan.micro_batch_size == megatron_gpu.MICRO_BATCH


def test_the_table_has_what_was_measured_beside_what_was_predicted(tmp_path):
    manifest = build_dataset(tmp_path / "aligned")
    for name in ("student", "teacher"):
        save_model(tmp_path / name, "llama")
    times = [9000, 9000, 9000, 2000, 4000, 3000]
    log = "".join(f" elapsed time per iteration (ms): {time:.1f} |\n" for time in times)
    for run in ("plain", "colocated", "context"):
        (tmp_path / f"{run}.log").write_text(f"{log} max allocated: 2048.00 | max allocated: 1.0")
    machine = {"flops": 1e9, "gpu": "NVIDIA H100 80GB HBM3"}
    plain, colocated, context = megatron_gpu.table_rows(tmp_path, 8, machine)
    shape, tokens = read_shape(tmp_path / "student"), 64 * 2048
    ratio = manifest.totals["num_teacher_tokens"] / manifest.totals["num_student_tokens"]
    share = 6 * shape.weights_per_token * tokens / 3 / 1e9
    assert plain[:3] == ("plain", "1", "3.00")
    assert plain[4:7] == (f"{tokens / 3:,.0f}", f"{share:.0%}", "2")
    assert colocated[1] == "8"
    assert colocated[5] == f"{share * (1 + ratio / 3) / 8:.0%}"
    assert context[3] == context[7] == "–"
    plan = Plan("s", "t", gpus=8, micro_batch_size=4, global_batch_size=64,
                teacher_micro_batch_size=4, teacher_tokens=ratio, overhead_gib=0)  # fmt: skip
    found = predict(plan, shape, shape)
    assert colocated[3] == f"{found.step_seconds:.2f}"
    assert colocated[7] == f"{found.student_gib:.0f}"


def test_a_prediction_is_printed(tmp_path, capsys, monkeypatch):
    for name in ("student", "teacher"):
        save_model(tmp_path / name, "llama")
    models = ["--student", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher")]
    monkeypatch.setattr(sys, "argv", ["megatron_gpu.py", "--predict", *models, "--gpus", "8"])
    megatron_gpu.main()
    said = capsys.readouterr().out
    assert "8 × h100, teacher colocated; 1024 rows of 2048" in said
    assert "GiB of 80 on a student's rank" in said
    assert "communication not counted" in said


def test_losses_are_scored_before_they_are_read(commands):
    (scored,) = (number for number, line in enumerate(commands) if "beam_jobs.score" in line)
    (read,) = (number for number, line in enumerate(commands) if "--vocag-stored-losses" in line)
    assert scored < read
    argv = commands[scored]
    assert parse_options(argv[argv.index("beam_jobs.score") + 1 :]).seq_length == 2048
