"""torch's view of its GPUs, in its own process."""

import json
from typing import Any

import torch

from pipeline.command_line.failures import first_line
from pipeline.models.varlen import fits_kernel, missing_kernel


def print_answers() -> None:
    """Print the result of `describe_gpu` as JSON."""
    devices = [_describe_device(number) for number in range(torch.cuda.device_count())]
    told = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices}
    print(json.dumps(told | {"missing_kernel": missing_kernel()}))


def _describe_device(number: int) -> dict[str, Any]:
    device = torch.device("cuda", number)
    found = torch.cuda.get_device_properties(number)
    known = {"name": found.name, "memory_bytes": found.total_memory}
    try:
        states = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:  # such as of a GPU that is too old for this torch
        return known | {"problem": first_line(error)}
    return known | {
        "packed_kernel": fits_kernel(states, states),
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        "fused_optimizer": _is_fused(device),
    }


def _is_fused(device: torch.device) -> bool:
    weight = torch.zeros(1, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except RuntimeError:
        return False
    return True
