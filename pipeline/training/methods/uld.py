"""Distillation by sorted probabilities, any vocabulary (Eq. 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.guidance import LossResult
from pipeline.guidance.baselines.distillation import distillation_loss
from pipeline.guidance.baselines.uld import WEIGHT, place_at, truncated_pairs, uld_losses
from pipeline.guidance.cross_entropy import map_token_chunks
from pipeline.training.methods.interface import MethodKind

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    batch, mask = given.batch, given.batch["loss_mask"]
    bounds = (batch["cu_seqlens"], batch["teacher_cu_seqlens"])
    student_places, teacher_places = truncated_pairs(*map(_joined_bounds, bounds))
    used = mask.bool().flatten()[student_places]
    student_places, teacher_places = student_places[used], teacher_places[used]
    values = map_token_chunks(
        lambda s, t: uld_losses(given.layer.logits(s), given.teacher_layer.logits(t)),
        given.hidden.flatten(0, 1)[student_places],
        given.teacher_states().flatten(0, 1)[teacher_places],
    )
    return distillation_loss(
        given.scores.losses,
        place_at(values, student_places, mask.numel()).view(mask.shape),
        loss_mask=mask,
        weight=given.weight,
    )


def _joined_bounds(cu_seqlens: Tensor) -> Tensor:
    """Return the segment bounds of all rows laid end to end; each row ends with its length."""
    seq_length = cu_seqlens[0, -1]
    starts = torch.arange(len(cu_seqlens), device=cu_seqlens.device) * seq_length
    bounds = cu_seqlens[:, :-1] + starts[:, None]
    return torch.cat([bounds.flatten(), (len(cu_seqlens) * seq_length).view(1)])


ULD = MethodKind("uld", _loss, needs="model", weight=WEIGHT)
