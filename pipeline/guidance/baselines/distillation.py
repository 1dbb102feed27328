"""What the logit-matching baselines share: cross entropy plus a weighted divergence per token."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.guidance.checks import check_finite, check_same_shape
from pipeline.guidance.loss import LossResult


def distillation_loss(
    student_losses: Tensor, divergences: Tensor, *, loss_mask: Tensor, weight: float
) -> LossResult:
    """Add a divergence to the cross entropy of every token that counts.

    Args:
        student_losses: float [rows, seq_length], nats, with a gradient.
        divergences: float [rows, seq_length], student from teacher, with a gradient; 0 where the
            teacher has nothing to compare with.
        loss_mask: bool or float [rows, seq_length].
        weight: λ, `pipeline.guidance.baselines.kld.WEIGHT` (Eq. 5: equal weights) or
            `pipeline.guidance.baselines.uld.WEIGHT` (Eq. 6) for the paper's.

    Returns:
        Sum over the mask of `student_losses + weight * divergences`, the mask's size, and the
        metrics `student_loss` and `divergence`.

    Raises:
        NonFiniteLossError: NaN or infinite values where the mask counts; names the row.
        ValueError: shapes disagree or the weight is negative.

    Example:
        >>> distillation_loss(losses, kld_losses(logits, teacher_logits), loss_mask=mask, weight=1)

    Source: VocAgnoLM (arXiv 2503.19123), Eq. 5 and 6.
    """
    check_same_shape(student_losses, divergences=divergences, loss_mask=loss_mask)
    if not weight >= 0:
        raise ValueError(f"weight must not be negative, got {weight}: it is the λ of Eq. 5 and 6")
    mask = loss_mask.bool()
    check_finite({"student_losses": (student_losses, mask), "divergences": (divergences, mask)})
    cross_entropy = torch.where(mask, student_losses.float(), 0.0).sum()
    divergence = torch.where(mask, divergences.float(), 0.0).sum()
    count = mask.sum()
    metrics = {
        "student_loss": torch.stack((cross_entropy.detach(), count)).double(),
        "divergence": torch.stack((divergence.detach(), count)).double(),
    }
    return LossResult(cross_entropy + weight * divergence, count, metrics)
