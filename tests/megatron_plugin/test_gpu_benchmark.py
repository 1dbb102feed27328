"""The GPU benchmark's commands, as far as they can be checked without a GPU."""

import os
import subprocess
from argparse import ArgumentParser

import pytest

pytest.importorskip("megatron.core")

from beam_jobs.score.options import parse_options
from megatron_plugin.arguments import add_arguments, read_options
from tests.megatron_plugin.forked_ranks import ROOT

SCRIPT = ROOT / "benchmarks/megatron_gpu.sh"
TRAINER = "megatron_plugin.pretrain_gpt"
# Stands in for Python and notes what it would have run.
RECORDER = """#!/bin/sh
{ for argument; do printf '%s\\0' "$argument"; done; printf '\\n'; } >> "$RECORD"
"""


@pytest.fixture
def commands(tmp_path):
    """Return the arguments of every command of a whole benchmark."""
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    record = tmp_path / "commands"
    environment = os.environ | {"PYTHON": str(python), "RECORD": str(record), "STEPS": "3"}
    environment |= {"GPUS": "2", "ENGINE": "1"}
    subprocess.run([SCRIPT, tmp_path / "work"], check=True, env=environment, cwd=ROOT)
    return [line.split("\0")[:-1] for line in record.read_text().splitlines()]


def test_every_run_has_arguments_that_work(commands):
    from megatron.training.arguments import add_megatron_arguments

    runs = []
    for argv in (line[line.index(TRAINER) + 1 :] for line in commands if TRAINER in line):
        parser = add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        known, unknown = parser.parse_known_args(argv)
        assert (unknown, known.train_iters) == ([], 3)
        runs.append(read_options(argv))
    assert len(runs) == 9
    assert [run.teacher.world_size for run in runs if run.teacher.name] == [0, 1]
    assert {run.rule.selector for run in runs} == {"full", "random", "teacher"}


def test_losses_are_scored_before_they_are_read(commands):
    (scored,) = (number for number, line in enumerate(commands) if "beam_jobs.score" in line)
    (read,) = (number for number, line in enumerate(commands) if "--vocag-stored-losses" in line)
    assert scored < read
    argv = commands[scored]
    assert parse_options(argv[argv.index("beam_jobs.score") + 1 :]).seq_length == 2048
