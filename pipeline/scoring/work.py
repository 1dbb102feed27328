"""How much arithmetic scoring is, and how fast this machine does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

__all__ = ["Work"]


@dataclass
class Work:
    """What scoring cost; add them up.

    Attributes:
        num_tokens: places that hold a token, context tokens included.
        num_places: places computed, padding included.
        num_operations: floating point operations that the tokens need, padding left out.
        seconds: wall time.
    """

    num_tokens: int = 0
    num_places: int = 0
    num_operations: float = 0.0
    seconds: float = 0.0


def _operations_per_token(model: PreTrainedModel) -> Callable[[NDArray[np.int64]], float]:
    """Return a function from lengths to the operations of a forward pass over such pieces.

    Two per weight of every matrix and token, the output layer included, and those of causal
    attention: two products of length**2 / 2 by the heads' width.
    """
    cast_model = cast(Any, model)
    embedding = cast_model.get_input_embeddings().weight
    tied = cast_model.get_output_embeddings().weight is embedding
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    weights -= 0 if tied else embedding.numel()
    layers = int(getattr(model.config, "num_hidden_layers", 0))
    width = int(getattr(model.config, "hidden_size", 0))

    def operations(lengths: NDArray[np.int64]) -> float:
        squares = float(np.square(lengths.astype(np.float64)).sum())
        return 2.0 * weights * float(lengths.sum()) + 2.0 * layers * width * squares

    return operations
