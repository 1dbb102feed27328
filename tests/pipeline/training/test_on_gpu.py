"""What a run gives on a GPU is what it gives on the CPU; each test runs on a stand-in, too."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from pipeline.methods import METHODS
from pipeline.methods.method import Method
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from pipeline.training.ranks import Ranks
from tests.support.runs import read_log, require_equal_weights
from tests.support.scored_data import run_score, sidecars, train_config

pytestmark = pytest.mark.slow

STEPS = 4
# Of a mean loss of 6 nats after four steps; bf16's share of it is 2^-9 of each operand.
TOLERANCES = {"fp32": 1e-3, "bf16": 0.05}
STORED = ["full", "random", "student_entropy", "teacher", "chunks", "alm", "distill"]


def losses(config: TrainConfig, device: str) -> list[float]:
    """Train on a device; return each step's loss."""
    train(config, Ranks(torch.device(device)))
    return [step["loss"] for step in read_log(config.output)]


def config_of(root: Path, output: Path, method: str, precision: str) -> TrainConfig:
    needs = METHODS[method].needs
    teaching = {} if needs == "nothing" else {"stored_losses": (str(root / "teacher"),)}
    changes = {"method": Method(method), "bf16": precision == "bf16", "num_steps": STEPS}
    return train_config(root, output, **changes, **teaching)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("method", STORED)
def test_first_steps_have_the_losses_of_the_cpu(
    drawn: Path, tmp_path: Path, gpu: str, method: str, precision: str
) -> None:
    on_cpu = losses(config_of(drawn, tmp_path / "cpu", method, precision), "cpu")
    on_gpu = losses(config_of(drawn, tmp_path / "gpu", method, precision), gpu)
    assert len(on_gpu) == STEPS
    np.testing.assert_allclose(on_gpu, on_cpu, atol=TOLERANCES[precision])


def test_bf16_is_near_fp32(drawn: Path, tmp_path: Path, gpu: str) -> None:
    """And not equal: else nothing was rounded."""
    found = [
        losses(config_of(drawn, tmp_path / precision, "distill", precision), gpu)
        for precision in TOLERANCES
    ]
    np.testing.assert_allclose(*found, atol=TOLERANCES["bf16"])
    assert found[0] != found[1]


@pytest.mark.parametrize("method", ["full", "distill"])
def test_a_run_resumes_bit_for_bit(drawn: Path, tmp_path: Path, gpu: str, method: str) -> None:
    whole = config_of(drawn, tmp_path / "whole", method, "bf16")
    halves = replace(whole, output=tmp_path / "halves")
    every = losses(whole, gpu)
    losses(replace(halves, exit_after=STEPS // 2), gpu)
    assert losses(halves, gpu) == every
    require_equal_weights(whole.output, halves.output)


def test_scores_are_those_of_the_cpu(unscored: Path, tmp_path: Path, gpu: str) -> None:
    """Losses by rounding; nearly always the same tokens are likeliest and drawn."""
    found = []
    for number, device in enumerate(("cpu", gpu)):
        root = shutil.copytree(unscored, tmp_path / str(number))
        run_score(root, "--top-k", "4", "--draws", "3", "--device", device)
        found.append(
            {name: load(data) for name, data in sidecars(root).items() if is_sidecar(name)}
        )
    expected, actual = found
    assert expected.keys() == actual.keys()
    assert expected
    for name, tensors in expected.items():
        for field, values in tensors.items():
            own = actual[name][field]
            if values.dtype.kind == "f":
                np.testing.assert_allclose(own, values, atol=0.02)
            else:
                assert (own == values).mean() > 0.998


def is_sidecar(name: str) -> bool:
    return name.endswith(".safetensors")
