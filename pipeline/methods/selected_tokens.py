"""Cross entropy of the tokens that a rule selects: the paper's method, and baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from pipeline.losses.loss_result import LossResult
    from pipeline.methods.micro_batch_loss import MicroBatchLoss


def _loss(given: MicroBatchLoss) -> LossResult:
    return given.selected_loss(given.select(given.teacher_losses()))


KINDS = (
    MethodKind(
        "teacher",
        "tokens on which the student is furthest behind the teacher: the paper",
        _loss,
        selector="teacher",
        needs="losses",
        known="the paper's selection lost to plain training (full) in our runs with students of 26 "
        "to 135 M parameters, on noisy and on clean text: docs/evidence.md",
    ),
    MethodKind(
        "full",
        "every token: plain continual pretraining, no teacher",
        _loss,
        all_learn=True,
        chooses=False,
    ),
    MethodKind(
        "random",
        "chance: what a teacher must beat",
        _loss,
        selector="random",
        unread=("aggregation",),
    ),
    MethodKind(
        "student_loss",
        "the student's own judgement",
        _loss,
        selector="student_loss",
        unread=("aggregation",),
    ),
    MethodKind(
        "student_entropy",
        "the student's own judgement, by its entropy",
        _loss,
        selector="student_entropy",
        unread=("aggregation",),
    ),
    MethodKind(
        "teacher_loss",
        "tokens that the teacher finds easiest",
        _loss,
        selector="teacher_loss",
        needs="losses",
    ),
)
