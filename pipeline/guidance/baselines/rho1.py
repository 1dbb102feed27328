"""Rho-1: selective language modelling with a reference model of the student's own vocabulary.

Two ways of it. `select_by_reference` keeps what the student is furthest behind the reference on
(Rho-1 proper: 60 % of the tokens for its 1B model). `select_by_self_reference` asks the reference
alone and needs no student: it drops what the reference finds hard or is unsure of. The latter is
what VocAgnoLM's Table 1 calls Rho-1.

One vocabulary means that every token of the mask has a reference loss, the end of a document among
them: none is unmapped.

Source: Lin et al. (arXiv 2404.07965), as compared with in VocAgnoLM (arXiv 2503.19123).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.guidance.checks import check_finite, check_same_shape
from pipeline.guidance.selection import Scope, Selection, SelectionRule, select_tokens

KEEP_FRACTION = 0.6
"""Share that Rho-1 keeps of its 1B model's tokens."""
SELF_REFERENCE_FRACTION = 0.7
"""Share of the tokens, by loss and by entropy each, whose common part self-reference keeps."""


@torch.no_grad()
def select_by_reference(
    student_losses: Tensor,
    reference_losses: Tensor,
    *,
    loss_mask: Tensor,
    keep_fraction: float = KEEP_FRACTION,
    scope: Scope = "microbatch",
    group: dist.ProcessGroup | None = None,
    positions: Tensor | None = None,
) -> Selection:
    """Keep the tokens on which the student is furthest behind the reference model.

    Args:
        student_losses: float [rows, seq_length], nats.
        reference_losses: float [rows, seq_length], nats, of the same labels.
        loss_mask: bool or float [rows, seq_length].
        keep_fraction: share of the mask to keep.
        scope: as in `SelectionRule`.
        group: as in `select_tokens`.
        positions: as in `select_tokens`.

    Returns:
        The selection; its guidance is the reference loss.

    Raises:
        NonFiniteLossError: NaN or infinite losses where the mask counts; names the row.
        ValueError: shapes disagree.

    Example:
        >>> select_by_reference(losses, reference_losses, loss_mask=mask, keep_fraction=0.4)

    Source: arXiv 2404.07965, section 2.2: the excess loss.
    """
    check_same_shape(student_losses, reference_losses=reference_losses, loss_mask=loss_mask)
    check_finite({"reference_losses": (reference_losses, loss_mask.bool())}, group)
    return select_tokens(
        student_losses,
        reference_losses,
        loss_mask=loss_mask,
        rule=SelectionRule(keep_fraction=keep_fraction, scope=scope, unmapped="exclude"),
        group=group,
        positions=positions,
    )


@torch.no_grad()
def select_by_self_reference(
    reference_losses: Tensor,
    reference_entropies: Tensor,
    *,
    loss_mask: Tensor,
    keep_fraction: float = SELF_REFERENCE_FRACTION,
    scope: Scope = "microbatch",
    group: dist.ProcessGroup | None = None,
    positions: Tensor | None = None,
) -> Selection:
    """Keep the tokens that are easy for the reference model by its loss and by its entropy.

    Args:
        reference_losses: float [rows, seq_length], nats, of the student's labels.
        reference_entropies: float [rows, seq_length], nats, of the predictions of these labels.
        loss_mask: bool or float [rows, seq_length].
        keep_fraction: the lowest share by loss and the lowest share by entropy; kept is what lies
            in both, so the share that is kept is smaller: 0.49 if they had nothing in common.
        scope: as in `SelectionRule`.
        group: as in `select_tokens`.
        positions: as in `select_tokens`.

    Returns:
        The selection; its guidance is the reference loss, its threshold minus the largest loss that
        passes.

    Raises:
        NonFiniteLossError: NaN or infinite values where the mask counts; names the row.
        ValueError: shapes disagree.

    Example:
        >>> select_by_self_reference(losses, entropies, loss_mask=mask).kept.sum()

    Source: arXiv 2404.07965, self-reference with the intersection of loss and entropy; VocAgnoLM's
        Table 1.
    """
    check_same_shape(reference_losses, reference_entropies=reference_entropies, loss_mask=loss_mask)
    mask = loss_mask.bool()
    check_finite(
        {
            "reference_losses": (reference_losses, mask),
            "reference_entropies": (reference_entropies, mask),
        },
        group,
    )

    def lowest(values: Tensor) -> Selection:
        return select_tokens(
            values,
            values,
            loss_mask=mask,
            rule=SelectionRule("teacher_loss", keep_fraction, "exclude", scope),
            group=group,
            positions=positions,
        )

    by_loss = lowest(reference_losses.masked_fill(~mask, 0.0))
    by_entropy = lowest(reference_entropies.masked_fill(~mask, 0.0))
    return Selection(
        by_loss.kept & by_entropy.kept, mask, mask, by_loss.guidance, by_loss.threshold
    )
