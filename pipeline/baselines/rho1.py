"""Rho-1: selective language modelling with a reference model of the student's own vocabulary.

Source: Lin et al. (arXiv 2404.07965), as compared with in VocAgnoLM (arXiv 2503.19123).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.loss_checks import check_choice, check_finite, check_same_shape
from pipeline.selection import Scope, Selection, SelectionRule, select_tokens

Scoring = Literal["excess_loss", "entropy_and_excess_loss"]


@torch.no_grad()
def select_by_reference(
    student_losses: Tensor,
    reference_losses: Tensor,
    *,
    loss_mask: Tensor,
    scoring: Scoring = "excess_loss",
    student_entropies: Tensor | None = None,
    keep_fraction: float = 0.4,
    scope: Scope = "microbatch",
    group: dist.ProcessGroup | None = None,
    positions: Tensor | None = None,
) -> Selection:
    """Keep the tokens on which the student is furthest behind the reference model.

    One vocabulary means that every token of the mask has a reference loss: none is unmapped.

    Args:
        student_losses: float [rows, seq_length], nats.
        reference_losses: float [rows, seq_length], nats, of the same labels.
        loss_mask: bool or float [rows, seq_length].
        scoring: `excess_loss`: student loss minus reference loss. `entropy_and_excess_loss`: the
            student's entropy plus that difference, both in nats with equal weight.
        student_entropies: float [rows, seq_length], nats; for `entropy_and_excess_loss` only.
        keep_fraction: share of the mask to keep.
        scope: as in `SelectionRule`.
        group: as in `select_tokens`.
        positions: as in `select_tokens`.

    Returns:
        The selection; its guidance is the reference loss.

    Raises:
        NonFiniteLossError: NaN or infinite losses where the mask counts; names the row.
        ValueError: shapes disagree or entropies are missing.

    Example:
        >>> select_by_reference(losses, reference_losses, loss_mask=mask, keep_fraction=0.6)
    """
    check_choice("scoring", scoring, Scoring)
    check_same_shape(
        student_losses,
        reference_losses=reference_losses,
        loss_mask=loss_mask,
        student_entropies=student_entropies,
    )
    mask = loss_mask.bool()
    values = {"reference_losses": (reference_losses, mask)}
    scored = student_losses
    if scoring == "entropy_and_excess_loss":
        if student_entropies is None:
            raise ValueError("scoring 'entropy_and_excess_loss' needs student_entropies")
        values["student_entropies"] = (student_entropies, mask)
        scored = student_losses + student_entropies
    check_finite(values, group)
    return select_tokens(
        scored,
        reference_losses,
        loss_mask=mask,
        rule=SelectionRule(keep_fraction=keep_fraction, scope=scope, unmapped="exclude"),
        group=group,
        positions=positions,
    )
