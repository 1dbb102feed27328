"""Distil sorted probabilities, from a teacher with any vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.losses.loss_result import LossResult
    from pipeline.methods.hf_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    from pipeline.losses.cross_entropy import map_token_chunks
    from pipeline.losses.distillation import truncated_pairs, truncated_turns, uld_losses
    from pipeline.models.output_layer import output_layer

    batch = given.batch
    own, others = output_layer(given.student), output_layer(given.running_teacher)
    if batch.layout.of_chats:
        mask, spans = batch["loss_mask"], batch["teacher_spans"]
        places, teacher_places = truncated_turns(mask, spans, batch.teacher_has_loss)
    else:
        bounds = (batch["cu_seqlens"], batch["teacher_cu_seqlens"])
        places, teacher_places = truncated_pairs(*map(_joined_bounds, bounds))
    counted = batch["loss_mask"].bool()
    used = counted.flatten()[places]
    values = map_token_chunks(
        lambda s, t: uld_losses(own.logits(s), others.logits(t)),
        given.hidden.flatten(0, 1)[places[used]],
        given.teacher_states.flatten(0, 1)[teacher_places[used]],
    )
    divergences = values.new_zeros(counted.numel()).index_copy(0, places[used], values)
    return given.with_divergences(divergences.view(counted.shape))


def _joined_bounds(cu_seqlens: Tensor) -> Tensor:
    """Return the bounds of all rows' segments end to end, some of them empty."""
    import torch

    starts = torch.arange(len(cu_seqlens), device=cu_seqlens.device) * cu_seqlens[0, -1]
    return (cu_seqlens + starts[:, None]).flatten()


KINDS = (
    MethodKind(
        "uld",
        "distillation by sorted probabilities (Eq. 6), any vocabulary",
        _loss,
        needs="model",
        chooses=False,
        weight=0.5,
        options=("weight",),
    ),
)
