"""Match both models' likelihoods of text, by their losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from pipeline.losses.loss_result import LossResult
    from pipeline.methods.micro_batch_loss import MicroBatchLoss


def _loss(given: MicroBatchLoss) -> LossResult:
    from pipeline.losses.likelihood_matching import likelihood_divergences

    batch, teacher_losses = given.batch, given.teacher_losses()
    assert teacher_losses is not None
    divergences = likelihood_divergences(
        given.scores.losses,
        teacher_losses,
        batch["teacher_spans"],
        loss_mask=given.loss_mask,
        teacher_loss_mask=given.teacher_has_loss,
        spans_checked=given.widest_span is not None,
    )
    return given.with_divergences(divergences, given.select(teacher_losses).kept)


KINDS = (
    MethodKind(
        "alm",
        "match the teacher's likelihood of text by its losses; keeps cross entropy if asked",
        _loss,
        selector="teacher",
        needs="losses",
        every_token=True,
        all_learn=True,
        keep_fraction=0.0,  # no cross entropy but that of tokens without guidance
        unread=("expectation",),  # divided by all labels
        options=("weight",),
    ),
)
