"""Distil the distributions of a teacher with the student's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.methods.kind import MethodKind

if TYPE_CHECKING:
    from pipeline.losses.loss_result import LossResult
    from pipeline.methods.hf_pass import StudentPass


def _loss(given: StudentPass) -> LossResult:
    from pipeline.losses.cross_entropy import map_token_chunks
    from pipeline.losses.distillation import kld_losses
    from pipeline.models.output_layer import output_layer

    counted = given.batch["loss_mask"].bool()
    own, others = output_layer(given.student), output_layer(given.running_teacher)
    # A tokenizer's file may name tokens for which its models have no row.
    shared = given.vocab_size and min(given.vocab_size, own.vocab_size, others.vocab_size)
    values = map_token_chunks(
        lambda s, t: kld_losses(own.logits(s), others.logits(t), vocab_size=shared),
        given.hidden[counted],
        given.reference_states()[counted],
    )
    return given.with_divergences(values.new_zeros(counted.shape).masked_scatter(counted, values))


KINDS = (
    MethodKind(
        "kld",
        "distillation by distributions (Eq. 5); a teacher of the student's vocabulary",
        _loss,
        needs="model",
        chooses=False,
        one_vocabulary=True,
        options=("weight",),
    ),
)
