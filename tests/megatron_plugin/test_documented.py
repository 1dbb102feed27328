"""What docs/guides/megatron.md tells people to start can be stopped, and goes on bit for bit."""

import re
import shlex

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_plugin.models.weight_sources import TRACKER_FILE
from tests.megatron_plugin.forked_ranks import ROOT
from tests.megatron_plugin.training_job import merged, train

pytestmark = pytest.mark.slow

MANUAL = ROOT / "docs/guides/megatron.md"
TRAINER = "megatron_plugin.pretrain_gpt"
# What makes a documented job small enough for this machine; the rest stays as it is documented.
SMALL = {
    "seq-length": 64,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 6,
    "lr-warmup-iters": 1,
    "lr": "1e-3",
    "min-lr": "1e-4",
    "save-interval": 3,
    "exit-interval": 3,
    "eval-interval": 3,
    "eval-iters": 1,
    "vocag-teacher-micro-batch-size": 2,
    "vocag-teacher-world-size": 2,
}
OF_THIS_JOB = ("vocag-data", "vocag-student", "vocag-teacher", "vocag-cache-folder", "load")


def documented():
    """Return the options of each command of the manual, None where one has no value."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", MANUAL.read_text(), re.MULTILINE | re.DOTALL)
    found = []
    for block in blocks:
        for command in block.replace("\\\n", " ").splitlines():
            if f"-m {TRAINER}" not in command:
                continue
            words = shlex.split(command.partition(TRAINER)[2].replace("…", ""))
            options = {}
            for word in words:
                if word.startswith("--"):
                    options[name := word.removeprefix("--")] = ""
                else:
                    options[name] = f"{options[name]} {word}".strip()
            found.append(options)
    return found


COMMANDS = documented()


def test_the_manual_has_commands():
    assert len(COMMANDS) >= 3
    assert {"save", "load"} <= COMMANDS[-1].keys()


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_documented_run_goes_on_bit_for_bit(inputs, tmp_path, number):
    options = {name: SMALL.get(name, value) for name, value in COMMANDS[number].items()}
    options = {name: value for name, value in options.items() if name not in OF_THIS_JOB}
    options |= {name: SMALL[name] for name in ("save-interval", "train-iters")}
    if "vocag-validation-data" in options:
        options["vocag-validation-data"] = inputs.validation
    else:
        options["eval-iters"] = 0
    teachers = options.get("vocag-teacher-world-size", 0)
    num_ranks = teachers + (1 if number == 0 else 2)
    checkpoint = tmp_path / "checkpoint"
    options |= {"save": checkpoint, "load": checkpoint, "tensorboard-dir": tmp_path / "board"}

    def weights(name):
        done = train(inputs, num_ranks, tmp_path / name, **options)
        assert "iteration        6/       6" in done.stdout
        return merged(tmp_path / name, "weights", inputs.student), done.stdout

    six, _ = weights("six")
    (checkpoint / TRACKER_FILE).write_text("3")
    again, said = weights("again")
    assert "iteration        4/       6" in said
    assert "iteration        3/       6" not in said
    assert all(torch.equal(six[name], again[name]) for name in six)
