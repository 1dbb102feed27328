"""Distillation by distributions over one vocabulary (Eq. 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.guidance import LossResult
from pipeline.guidance.baselines.distillation import distillation_loss
from pipeline.guidance.baselines.kld import WEIGHT, kld_losses
from pipeline.guidance.baselines.uld import place_at
from pipeline.guidance.cross_entropy import map_token_chunks
from pipeline.training.methods.interface import MethodKind

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    mask = given.batch["loss_mask"]
    counted = mask.bool()
    values = map_token_chunks(
        lambda s, t: kld_losses(
            given.layer.logits(s),
            given.teacher_layer.logits(t),
            vocab_size=given.vocab_size,
            direction=given.method.kld_direction,
        ),
        given.hidden[counted],
        given.reference_states()[counted],
    )
    places = counted.flatten().nonzero().squeeze(-1)
    return distillation_loss(
        given.scores.losses,
        place_at(values, places, counted.numel()).view(counted.shape),
        loss_mask=mask,
        weight=given.weight,
    )


KLD = MethodKind("kld", _loss, needs="model", one_vocabulary=True, weight=WEIGHT)
