"""Rho-1: tokens chosen by a reference model of the student's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from pipeline.losses.loss_result import LossResult
    from pipeline.methods.hf_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    from pipeline.guidance.baselines import select_by_reference

    selection = select_by_reference(
        given.scores.losses,
        given.reference_scores().losses,
        loss_mask=given.batch["loss_mask"],
        rule=given.rule,
        group=given.group,
    )
    return given.selected_loss(selection)


def _self_reference_loss(given: StudentPass) -> LossResult:
    from pipeline.guidance.baselines import select_by_self_reference

    reference = given.reference_scores(with_entropy=True)
    assert reference.entropies is not None
    selection = select_by_self_reference(
        reference.losses,
        reference.entropies,
        loss_mask=given.batch["loss_mask"],
        rule=given.rule,
        group=given.group,
    )
    return given.selected_loss(selection)


KINDS = (
    MethodKind(
        "rho1",
        "Rho-1 with a reference model of the student's vocabulary",
        _loss,
        needs="model",
        one_vocabulary=True,
        unread=("unmapped", "aggregation"),
        keep_fraction=0.6,  # of its 1B model's tokens
    ),
    MethodKind(
        "rho1_self",
        "Rho-1's self-reference: easy for the reference by loss and by entropy",
        _self_reference_loss,
        needs="model",
        one_vocabulary=True,
        unread=("unmapped", "aggregation"),
        keep_fraction=0.7,  # by each
    ),
)
