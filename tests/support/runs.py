"""What `vocag train` leaves."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def read_log(output: Path) -> list[dict[str, Any]]:
    """Return what a run has logged, a step each."""
    return [json.loads(line) for line in (output / "log.jsonl").read_text("utf-8").splitlines()]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    """Return a run's last weights by name."""
    return load_file(output / "model" / "model.safetensors")


def require_equal_weights(first: Path, second: Path) -> None:
    """Fail unless two runs have left the same weights, bit for bit."""
    one, two = weights_of(first), weights_of(second)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
