"""Copies between host and device that let the host go on."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(
    tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a copy of a host's tensor; from pages that may move, the host would wait for it."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=True)
