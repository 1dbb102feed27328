"""Rho-1 with a reference model of the student's vocabulary, and its self-reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.guidance import LossResult, guided_loss
from pipeline.guidance.baselines.rho1 import (
    KEEP_FRACTION,
    SELF_REFERENCE_FRACTION,
    select_by_reference,
    select_by_self_reference,
)
from pipeline.training.methods.interface import MethodKind

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    selection = select_by_reference(
        given.scores.losses,
        given.reference_scores().losses,
        loss_mask=given.batch["loss_mask"],
        rule=given.rule,
        group=given.group,
    )
    return guided_loss(given.scores.losses, selection, expectation=given.method.expectation)


def _self_reference_loss(given: StudentPass) -> LossResult:
    reference = given.reference_scores(with_entropy=True)
    assert reference.entropies is not None
    selection = select_by_self_reference(
        reference.losses,
        reference.entropies,
        loss_mask=given.batch["loss_mask"],
        rule=given.rule,
        group=given.group,
    )
    return guided_loss(given.scores.losses, selection, expectation=given.method.expectation)


RHO1 = MethodKind("rho1", _loss, needs="model", one_vocabulary=True, keep_fraction=KEEP_FRACTION)
RHO1_SELF = MethodKind(
    "rho1_self",
    _self_reference_loss,
    needs="model",
    one_vocabulary=True,
    keep_fraction=SELF_REFERENCE_FRACTION,
)
