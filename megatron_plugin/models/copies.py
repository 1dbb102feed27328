"""Copies between host and device that let the host continue."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of a host's tensor; from pages that may move, the host would wait for it."""
    if torch.cuda.is_available() and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
