"""Copies to the device that let the host continue."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy through pinned memory: otherwise the host would wait."""
    if torch.cuda.is_available() and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
