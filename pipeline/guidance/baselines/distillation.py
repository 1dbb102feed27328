"""What objectives beyond selection share: cross entropy plus a weighted divergence per token."""

import torch
from torch import Tensor

from pipeline.guidance.checks import check_finite, check_same_shape
from pipeline.guidance.loss import LossResult


def distillation_loss(
    student_losses: Tensor,
    divergences: Tensor,
    *,
    loss_mask: Tensor,
    weight: float,
    kept: Tensor | None = None,
) -> LossResult:
    """Add a divergence to the cross entropy of the tokens that count.

    Divergences, float [rows, seq_length], are the student's from the teacher, with a gradient as
    the losses have one; 0 where the teacher has nothing to compare with. The weight is λ; the
    paper's is 1 for KLD (Eq. 5: equal weights) and 0.5 for ULD (Eq. 6). `kept`, bool
    [rows, seq_length], are the labels whose cross entropy counts, None: all of the mask;
    divergences count either way.

    Returns the sum of the kept losses and of `weight * divergences` over the mask, the mask's size,
    and the metrics `student_loss`, `divergence` and, with `kept`, `kept_fraction`.

    Source: VocAgnoLM (arXiv 2503.19123), Eq. 5 and 6.
    """
    check_same_shape(student_losses, divergences=divergences, loss_mask=loss_mask, kept=kept)
    if not weight >= 0:
        raise ValueError(f"weight must not be negative, got {weight}: it is the λ of Eq. 5 and 6")
    mask = loss_mask.bool()
    check_finite({"student_losses": (student_losses, mask), "divergences": (divergences, mask)})
    wide = torch.promote_types(student_losses.dtype, torch.float32)
    losses = torch.where(mask, student_losses.to(wide), 0.0)
    cross_entropy, count = losses.sum(), mask.sum()
    divergence = torch.where(mask, divergences.to(wide), 0.0).sum()
    metrics = {
        "student_loss": torch.stack((cross_entropy.detach(), count)).double(),
        "divergence": torch.stack((divergence.detach(), count)).double(),
    }
    if kept is not None:
        cross_entropy = torch.where(kept, losses, 0.0).sum()
        metrics["kept_fraction"] = torch.stack(((kept & mask).sum(), count)).double()
    return LossResult(cross_entropy + weight * divergence, count, metrics)
