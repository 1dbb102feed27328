"""Floating point operations of a model's forward pass, as PyTorch counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

_SHORT, _LONG = 64, 128  # tokens; linear attention goes by chunks of 64


def operations_per_token(model: PreTrainedModel) -> Callable[[NDArray[np.int64]], float]:
    """Return a function from lengths to the operations of a forward pass over such pieces.

    Two passes over some tokens are counted, the output layer included. What grows with the square
    of a length is attention; PyTorch computes the future, too, which causal attention needs not,
    so half of it counts. Of experts those count that a token is routed to. A sliding window is
    counted as if it were open.

    Args:
        model: without gradients.

    Example:
        >>> operations_per_token(model)(np.array([512, 80]))  # doctest: +SKIP
        162529280.0
    """
    short, long = _count(model, _SHORT), _count(model, _LONG)
    by_square = (long / _LONG - short / _SHORT) / (_LONG - _SHORT)
    by_token = short / _SHORT - by_square * _SHORT

    def operations(lengths: NDArray[np.int64]) -> float:
        squares = float(np.square(lengths.astype(np.float64)).sum())
        return by_token * float(lengths.sum()) + by_square / 2 * squares

    return operations


@torch.no_grad()
def _count(model: PreTrainedModel, length: int) -> int:
    """Return the operations over one piece, by kernels whose operations PyTorch knows."""
    own_attention, cast_model = str(model.config._attn_implementation), cast(Any, model)
    own_experts = model.get_experts_implementation()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        with FlopCounterMode(display=False) as counter:
            ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
            cast_model(input_ids=ids, use_cache=False)
    finally:
        model.set_attn_implementation(own_attention)
        model.set_experts_implementation(own_experts)
    return int(counter.get_total_flops())
