"""Losses of student tokens from those of teacher tokens (Eq. 2)."""

from typing import get_args

import torch
from torch import Tensor

from pipeline.command_line.option_parsing import require_known
from pipeline.losses.loss_checks import check_finite
from pipeline.losses.spans import check_spans, span_sums
from pipeline.selection_rule import Aggregation


@torch.no_grad()
def aggregate_teacher_losses(
    teacher_losses: Tensor,
    teacher_spans: Tensor,
    how: Aggregation = "max",
    *,
    teacher_loss_mask: Tensor | None = None,
    widest_span: int | None = None,
) -> Tensor:
    """Give each student token the Φ of its teacher tokens' losses.

    Args:
        teacher_losses: float [rows, teacher_seq_length], nats; entry l is -log P(x_l | x_<l), NaN
            without a loss.
        teacher_spans: int [rows, seq_length, 2], half-open ranges of the row's teacher tokens,
            shifted to label positions; empty: unmapped. They may overlap.
        how: Φ.
        teacher_loss_mask: bool [rows, teacher_seq_length], where a loss is expected. None: where it
            isn't NaN.
        widest_span: width of the widest span, if spans and losses are checked, which spares the
            host a wait for the device. None: unchecked.

    Returns:
        fp32 [rows, seq_length], nats; NaN = unmapped.

    Raises:
        NonFiniteLossError: an infinite loss, or NaN where the mask expects a loss.
        ValueError: shapes disagree or a span leaves the row.

    Example:
        >>> losses = torch.tensor([[float("nan"), 2.0, 3.0]])
        >>> aggregate_teacher_losses(losses, torch.tensor([[[0, 3]]]), "max")
        tensor([[3.]])

    Source: Eq. 2.
    """
    require_known("how=", [how], get_args(Aggregation))
    losses = teacher_losses.detach().float()
    expected = ~losses.isnan() if teacher_loss_mask is None else teacher_loss_mask.bool()
    if widest_span is None:
        widest_span = check_spans(teacher_losses, teacher_spans, teacher_loss_mask)
        check_finite({"teacher_losses": (losses, expected | losses.isinf())})
    starts, ends = teacher_spans[..., 0].long(), teacher_spans[..., 1].long()
    counts = span_sums(expected.double(), starts, ends)
    if how == "max":
        values = _span_maxima(losses.masked_fill(~expected, -torch.inf), starts, ends, widest_span)
    else:
        values = span_sums(losses.masked_fill(~expected, 0.0).double(), starts, ends)
        values = values / counts if how == "mean" else values
    return values.float().masked_fill(counts == 0, torch.nan)


def _span_maxima(values: Tensor, starts: Tensor, ends: Tensor, widest: int) -> Tensor:
    """Take each span's maximum from tables of the maxima of 1, 2, 4, ... tokens.

    Two overlapping windows of the largest power of two that fits cover a span: on CPU 70 times
    faster than `scatter_reduce` on chunks of 256 (benchmarks/guidance.py).
    """
    widths = ends - starts
    maxima = values.new_full(starts.shape, -torch.inf)
    window = 1
    while window <= widest:
        fits = (widths >= window) & (widths < 2 * window)
        last = values.shape[-1] - 1
        left = values.gather(-1, starts.clamp(0, last))
        right = values.gather(-1, (ends - window).clamp(0, last))
        maxima = torch.where(fits, torch.maximum(left, right), maxima)
        if 2 * window <= widest:
            values = torch.maximum(values[:, :-window], values[:, window:])
        window *= 2
    return maxima
