"""Spans of a row's tokens: context, sums, and checks."""

import torch
from torch import Tensor


def has_context(cu_seqlens: Tensor, seq_length: int) -> Tensor:
    """Return which teacher tokens follow another of their document: only they can have a loss.

    `cu_seqlens`, int [..., segments + 1], are each row's segment bounds from 0 on, padded with
    `seq_length`. The result is bool [..., seq_length]; padding is a segment, too.

    Example:
        >>> has_context(torch.tensor([[0, 3, 4, 4]]), 4)
        tensor([[False,  True,  True, False]])
    """
    shape = (*cu_seqlens.shape[:-1], seq_length + 1)  # one more place for bounds at the row's end
    found = torch.ones(shape, dtype=torch.bool, device=cu_seqlens.device)
    return found.scatter_(-1, cu_seqlens.long(), False)[..., :-1]


def span_sums(values: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Add up each span of a row's values, fp64 or integers.

    An fp32 prefix sum would lose small losses: 1e-3 after 8,192 tokens of 3 nats.
    """
    prefix = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    return prefix.gather(-1, ends) - prefix.gather(-1, starts)


def check_spans(
    teacher_losses: Tensor, teacher_spans: Tensor, teacher_loss_mask: Tensor | None = None
) -> int:
    """Return the widest span's width; ValueError if shapes disagree or a span leaves the row."""
    if (
        teacher_losses.dim() != 2
        or teacher_spans.dim() != 3
        or teacher_spans.shape[0] != teacher_losses.shape[0]
        or teacher_spans.shape[2] != 2
    ):
        raise ValueError(
            f"teacher_losses {tuple(teacher_losses.shape)} must be [rows, teacher_seq_length] and "
            f"teacher_spans {tuple(teacher_spans.shape)} [rows, seq_length, 2] with the same rows"
        )
    if teacher_loss_mask is not None and teacher_loss_mask.shape != teacher_losses.shape:
        raise ValueError(
            f"teacher_loss_mask {tuple(teacher_loss_mask.shape)} must have the shape of "
            f"teacher_losses {tuple(teacher_losses.shape)}"
        )
    starts, ends = teacher_spans[..., 0], teacher_spans[..., 1]
    bad = (starts < 0) | (ends < starts) | (ends > teacher_losses.shape[1])
    if bool(bad.any()):
        row, position = bad.nonzero()[0].tolist()
        raise ValueError(
            f"teacher_spans[{row}, {position}] is {teacher_spans[row, position].tolist()}, but "
            f"0 <= start <= end <= {teacher_losses.shape[1]} (teacher_seq_length) must hold: the "
            "spans belong to other teacher tokens"
        )
    return int((ends - starts).max()) if starts.numel() else 0
