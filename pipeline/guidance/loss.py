"""Teacher guidance: which student tokens count, and the student's loss over them.

Three steps, all pure functions of tensors:

    guidance  = aggregate_teacher_losses(teacher_losses, teacher_spans, "max")
    selection = select_tokens(student_losses, guidance, loss_mask=loss_mask)
    result    = guided_loss(student_losses, selection)
    (result.loss_sum / result.num_tokens).backward()

Source: VocAgnoLM (arXiv 2503.19123), Eq. 2 to 4 and section 6.2.

Φ skips teacher losses of NaN: padding, and tokens without context (the first of a document). With
losses straight from a model give `teacher_loss_mask`, so that NaN where a loss was expected is an
error.
"""

from typing import get_args

import torch
from torch import Tensor

from pipeline.command_line.option_parsing import require_known
from pipeline.guidance.selection import Selection
from pipeline.losses.logits import widen
from pipeline.losses.loss_checks import check_same_shape
from pipeline.losses.loss_result import LossResult
from pipeline.losses.spans import check_spans, span_sums
from pipeline.selection_rule import Expectation


@torch.no_grad()
def mapped_tokens(teacher_spans: Tensor, has_loss: Tensor, *, checked: bool = False) -> Tensor:
    """Find the student tokens with a teacher token that has a loss, bool [rows, seq_length].

    For `select_tokens` if the selector doesn't rank by a teacher. If spans are `checked`, the host
    doesn't wait for the device. `has_loss` is bool [rows, teacher_seq_length].

    Example:
        >>> mapped_tokens(torch.tensor([[[0, 1], [0, 2]]]), torch.tensor([[False, True]]))
        tensor([[False,  True]])
    """
    if not checked:
        check_spans(has_loss, teacher_spans)
    starts, ends = teacher_spans[..., 0].long(), teacher_spans[..., 1].long()
    return span_sums(has_loss.long(), starts, ends) > 0


def guided_loss(
    student_losses: Tensor, selection: Selection, *, expectation: Expectation = "kept"
) -> LossResult:
    """Sum the student's loss over the kept tokens, with its divisor.

    Args:
        student_losses: float [rows, seq_length], nats, with a gradient.
        selection: of the same tokens.
        expectation: of Eq. 3, the mean over the `kept` tokens (as in Rho-1), or over `all` with the
            others' loss set to 0, which scales the learning rate by the kept fraction.

    Returns:
        Sum, divisor and metrics: `kept_fraction`, `mapped_fraction`, `teacher_loss`,
        `student_loss`, `student_loss_mapped`, `student_loss_unmapped`, `student_loss_kept`,
        `threshold`.

    Raises:
        ValueError: shapes disagree or the expectation is unknown.

    Example:
        >>> result = guided_loss(student_losses, selection)
        >>> (result.loss_sum / result.num_tokens.clamp_min(1)).backward()

    Source: Eq. 3.
    """
    require_known("expectation=", [expectation], get_args(Expectation))
    check_same_shape(student_losses, kept=selection.kept)
    counted = selection.kept if expectation == "kept" else selection.loss_mask
    # `where`, not a product: a masked NaN times 0 would still be NaN.
    loss_sum = torch.where(selection.kept, widen(student_losses), 0.0).sum()
    return LossResult(loss_sum, counted.sum(), _metrics(student_losses.detach(), selection))


def _metrics(losses: Tensor, selection: Selection) -> dict[str, Tensor]:
    mask, mapped = selection.loss_mask, selection.mapped
    groups = {
        "student_loss": mask,
        "student_loss_mapped": mapped,
        "student_loss_unmapped": mask & ~mapped,
        "student_loss_kept": selection.kept,
    }
    chosen = torch.stack(list(groups.values())).flatten(1)
    sums = torch.where(chosen, losses.flatten().double(), 0.0).sum(-1)
    counts = chosen.sum(-1).double()
    metrics = dict(zip(groups, torch.stack((sums, counts), -1).unbind(), strict=True))
    num_labels, num_mapped, _, num_kept = counts.unbind()
    metrics["kept_fraction"] = torch.stack((num_kept, num_labels))
    metrics["mapped_fraction"] = torch.stack((num_mapped, num_labels))
    if selection.guidance is not None:
        teacher = torch.where(mapped, selection.guidance, 0.0).double().sum()
        metrics["teacher_loss"] = torch.stack((teacher, num_mapped))
    threshold = selection.threshold.double()
    metrics["threshold"] = torch.stack((threshold.nansum(), (~threshold.isnan()).sum().double()))
    return metrics
