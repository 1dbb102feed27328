"""A method of a user's own, in one file: cross entropy, weighed by what the teacher knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from pipeline.guidance import LossResult
    from pipeline.methods.micro_batch_loss import MicroBatchLoss


def _loss(given: MicroBatchLoss) -> LossResult:
    import torch

    selection = given.select(given.teacher_losses())
    assert selection.guidance is not None
    weights = torch.exp(-selection.guidance.nan_to_num(0.0))
    result = given.selected_loss(selection)
    losses = torch.where(selection.kept, weights * given.scores.losses, 0.0)
    return result._replace(loss_sum=losses.sum())


KINDS = (
    MethodKind("weighed", "cross entropy, weighed", _loss, selector="teacher", needs="losses"),
)
