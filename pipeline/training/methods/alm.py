"""Approximate Likelihood Matching: no selection but beside it, by stored losses or a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.guidance import LossResult
from pipeline.guidance.baselines.distillation import distillation_loss
from pipeline.guidance.likelihood_matching import WEIGHT, likelihood_divergences
from pipeline.training.methods.interface import MethodKind
from pipeline.training.methods.selecting import select

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    batch, losses = given.batch, given.scores.losses
    teacher_losses = given.teacher_losses()
    assert teacher_losses is not None
    divergences = likelihood_divergences(
        losses,
        teacher_losses,
        batch["teacher_spans"],
        loss_mask=batch["loss_mask"],
        teacher_loss_mask=batch.teacher_has_loss,
    )
    return distillation_loss(
        losses,
        divergences,
        loss_mask=batch["loss_mask"],
        weight=given.weight,
        kept=select(given, teacher_losses).kept,
    )


ALM = MethodKind(
    "alm",
    _loss,
    selector="teacher",
    needs="losses",
    every_token=True,
    keep_fraction=0.0,  # no cross entropy but that of tokens without guidance
    weight=WEIGHT,
)
