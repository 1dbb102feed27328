"""What turns a model's last hidden states into logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OutputLayer:
    """An output layer without a bias, and what its model does to the products.

    A logit is `product * scale`, and with a cap `cap * tanh(product * scale / cap)`.

    Attributes:
        weight: float [V, H].
        scale: what products are multiplied by (Granite, Cohere, Falcon-H1).
        cap: the bound that logits never reach (Gemma, RecurrentGemma, xLSTM); None: no bound.
    """

    weight: Tensor
    scale: float = 1.0
    cap: float | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the weight."""
        return len(self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return whole logits, float [..., V], differentiable; for few tokens at once.

        Example:
            >>> OutputLayer(torch.eye(2), scale=0.5).logits(torch.ones(1, 2))
            tensor([[0.5000, 0.5000]])
        """
        return to_logits(hidden @ self.weight.T, self.scale, self.cap)


def to_logits(products: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return the logits of products of hidden states and output layer; see `OutputLayer`."""
    scaled = products if scale == 1.0 else products * scale
    return scaled if cap is None else torch.tanh(scaled / cap) * cap


def logit_slopes(logits: Tensor, scale: float, cap: float | None) -> Tensor | float:
    """Return what `to_logits` multiplies a gradient by, at these logits."""
    return scale if cap is None else (1.0 - (logits / cap).square()) * scale
