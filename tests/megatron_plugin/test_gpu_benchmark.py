"""The GPU benchmark's commands, as far as they can be checked without a GPU."""

import json
import os
import subprocess
from argparse import ArgumentParser

import pytest

pytest.importorskip("megatron.core")

from beam_jobs.score.options import parse_options
from megatron_plugin.arguments import add_arguments, read_options
from tests.megatron_plugin.launch import ROOT

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
    subprocess.run([SCRIPT, tmp_path / "work"], check=True, env=environment, cwd=ROOT)
    return [line.split("\0")[:-1] for line in record.read_text().splitlines()]


def test_every_run_has_arguments_that_work(commands):
    from megatron.training.arguments import add_megatron_arguments

    runs = [line[line.index(TRAINER) + 1 :] for line in commands if TRAINER in line]
    chosen = []
    for argv in runs:
        parser = add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        known, unknown = parser.parse_known_args(argv)
        assert unknown == []
        assert known.train_iters == 3
        options = read_options(argv)
        teacher = options.teacher and (options.teacher.is_cached, options.teacher.world_size)
        chosen.append((options.rule.selector, teacher))
    assert chosen == [
        ("full", None),
        ("random", None),
        ("teacher", (True, 0)),
        ("teacher", (False, 0)),
        ("teacher", (False, 1)),
    ]


def test_losses_are_scored_before_they_are_read(commands):
    lines = [json.dumps(line) for line in commands]
    (place,) = (number for number, line in enumerate(lines) if "beam_jobs.score" in line)
    (cached,) = (number for number, line in enumerate(lines) if '"cached"' in line)
    assert place < cached
    argv = commands[place]
    assert parse_options(argv[argv.index("beam_jobs.score") + 1 :]).seq_length == 2048


def test_without_a_folder_it_says_how_to_call_it():
    done = subprocess.run([SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "benchmarks/megatron_gpu.sh /scratch" in done.stderr
