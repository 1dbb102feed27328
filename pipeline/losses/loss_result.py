"""A loss with its metrics."""

from typing import NamedTuple

import torch
from torch import Tensor


class LossResult(NamedTuple):
    """A loss as a sum and a count, which add up over microbatches and ranks.

    A tuple, because wrappers of modules look for tensors in tuples.

    Attributes:
        loss_sum: fp32 (fp64 for fp64 losses) scalar, nats, differentiable.
        num_tokens: int64 scalar, the divisor; 0 if nothing was kept.
        metrics: by name, fp64 [2] = (numerator, denominator), detached; `metric_values` divides.
    """

    loss_sum: Tensor
    num_tokens: Tensor
    metrics: dict[str, Tensor]


def metric_values(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Divide summed metrics; NaN if nothing was counted.

    Example:
        >>> metric_values({"kept_fraction": torch.tensor([50.0, 100.0])})
        {'kept_fraction': 0.5}
    """
    stacked = torch.stack(list(metrics.values())).cpu()
    return dict(zip(metrics, (stacked[:, 0] / stacked[:, 1]).tolist(), strict=True))
