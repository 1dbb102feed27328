"""Distil the likeliest next tokens, stored or online, of a teacher with any vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind
from pipeline.selection_rule import RANKED_BY_TEACHER

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.losses.divergences import LabelDistributions
    from pipeline.losses.loss_result import LossResult
    from pipeline.methods.micro_batch_loss import MicroBatchLoss


def _loss(given: MicroBatchLoss) -> LossResult:
    from pipeline.losses.divergences import distilled_loss

    method, known = given.method, given.distributions
    assert known is not None
    return distilled_loss(
        given.scores,
        known,
        given.batch["labels"],
        loss_mask=given.loss_mask,
        weight=given.weight,
        chosen=None if method.distill_tokens == "all" else _chosen(given, known),
        temperature=method.temperature,
        reverse=method.reverse_kl,
    )


def _chosen(given: MicroBatchLoss, known: LabelDistributions) -> Tensor:
    from pipeline.guidance import select_tokens
    from pipeline.losses.divergences import teacher_entropies

    if given.rule.selector in RANKED_BY_TEACHER:
        kept = given.select(given.teacher_losses()).kept
    else:
        entropies = given.scores.entropies
        if given.rule.selector == "teacher_entropy":
            entropies = teacher_entropies(known)
        # Labels without a distribution would take places in the share.
        kept = select_tokens(
            given.scores.losses,
            None,
            loss_mask=given.loss_mask.bool() & known.can_teach(given.batch["labels"]),
            rule=given.rule,
            group=given.group,
            entropies=entropies,
            step=given.step,
        ).kept
    return kept if given.method.distill_tokens == "kept" else ~kept


KINDS = (
    MethodKind(
        "distill",
        "learn the teacher's next-token distributions (vocag score --top-k), any vocabulary",
        _loss,
        selector="teacher",
        needs="distributions",
        unread=("expectation",),  # divided by all labels
        weight=0.8,
        largest_weight=1.0,
        all_learn=True,
        options=(
            *("weight", "distill_map", "distill_tokens", "distill_by"),
            *("temperature", "reverse_kl"),
        ),
    ),
)
