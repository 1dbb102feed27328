"""Distillation by the likeliest next tokens, stored or online, of a teacher with any vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from pipeline.guidance import LossResult
    from pipeline.methods.micro_batch_loss import MicroBatchLoss


def _loss(given: MicroBatchLoss) -> LossResult:
    from pipeline.guidance.distributions import distilled_loss

    method, known = given.method, given.distributions
    assert known is not None
    chosen = None
    if method.distill_tokens != "all":
        kept = given.select(given.teacher_losses()).kept
        chosen = kept if method.distill_tokens == "kept" else ~kept
    return distilled_loss(
        given.scores,
        known.ids,
        known.probs,
        moved=known.moved,
        loss_mask=given.loss_mask,
        weight=given.weight,
        chosen=chosen,
        temperature=method.temperature,
        reverse=method.reverse_kl,
        draws=known.draws,
    )


KINDS = (
    MethodKind(
        "distill",
        "learn the teacher's next-token distributions (vocag score --top-k), any vocabulary",
        _loss,
        selector="teacher",
        needs="distributions",
        weight=0.8,
        options=("weight", "distill_tokens", "temperature", "reverse_kl"),
    ),
)
