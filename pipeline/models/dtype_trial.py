"""Which dtype a device computes a forward pass in fastest: tried, not guessed.

CPUs differ: with matrix units for bfloat16 a teacher scores 1.8 times as fast in it as in float32,
without them slower. A product takes milliseconds, so it is tried.
"""

import time
from functools import lru_cache
from typing import Literal

import torch

_TOKENS, _WIDTH, _ROUNDS = 512, 1024, 5
# A smaller gain is not worth losses that are rounded more coarsely.
_MIN_SPEEDUP = 1.2


def default_dtype(device: str) -> Literal["bfloat16", "float32"]:
    """Return the dtype for a device: bfloat16 on a GPU, and on a CPU that is faster in it.

    Example:
        >>> default_dtype("cuda")
        'bfloat16'
    """
    fast = device != "cpu" or bfloat16_speedup() >= _MIN_SPEEDUP
    return "bfloat16" if fast else "float32"


@lru_cache
def bfloat16_speedup() -> float:
    """Return how many times as fast as in float32 this CPU multiplies in bfloat16."""
    dtypes = (torch.float32, torch.bfloat16)
    best = dict.fromkeys(dtypes, float("inf"))
    # In turns, so that what else runs here slows both.
    for _ in range(_ROUNDS):
        for dtype in dtypes:
            best[dtype] = min(best[dtype], _product_seconds(dtype))
    return best[torch.float32] / best[torch.bfloat16]


def _product_seconds(dtype: torch.dtype) -> float:
    tokens = torch.ones(_TOKENS, _WIDTH, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    start = time.perf_counter()
    for _ in range(2):
        _ = tokens @ weight.T
    return time.perf_counter() - start
