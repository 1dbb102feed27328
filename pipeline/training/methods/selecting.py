"""Cross entropy of the tokens that a selector chooses: the paper's way, and what falsifies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from torch import Tensor

from pipeline.guidance import (
    LossResult,
    Selection,
    aggregate_teacher_losses,
    guided_loss,
    select_tokens,
)
from pipeline.guidance.loss import mapped_tokens
from pipeline.guidance.rule import RANKED_BY_TEACHER, Selector
from pipeline.training.methods.interface import MethodKind

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


def select(given: StudentPass, teacher_losses: Tensor | None) -> Selection:
    """Choose the labels that count.

    Args:
        given: the student's forward pass.
        teacher_losses: of `StudentPass.teacher_losses`.
    """
    batch = given.batch
    guidance = mapped = None
    if teacher_losses is None:
        mapped = mapped_tokens(batch["teacher_spans"], batch.teacher_has_loss)
    else:
        guidance = aggregate_teacher_losses(
            teacher_losses,
            batch["teacher_spans"],
            given.method.aggregation,
            teacher_loss_mask=batch.teacher_has_loss,
        )
    return select_tokens(
        given.scores.losses,
        guidance,
        loss_mask=batch["loss_mask"],
        rule=given.rule,
        group=given.group,
        teacher_losses=teacher_losses,
        mapped=mapped,
        student_entropies=given.scores.entropies,
        step=given.step,
    )


def _loss(given: StudentPass) -> LossResult:
    selection = select(given, given.teacher_losses())
    return guided_loss(given.scores.losses, selection, expectation=given.method.expectation)


SELECTING = tuple(
    MethodKind(
        selector,
        _loss,
        selector=selector,
        needs="losses" if selector in RANKED_BY_TEACHER else "nothing",
    )
    for selector in get_args(Selector)
)
