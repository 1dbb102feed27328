"""The loss of a micro-batch by each method, of what a student and its teacher make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.guidance import (
    LossResult,
    Selection,
    SelectionRule,
    aggregate_teacher_losses,
    guided_loss,
    mapped_tokens,
    select_tokens,
)
from pipeline.guidance.baselines.chunking import row_chunk_ids, select_chunks
from pipeline.guidance.baselines.distillation import distillation_loss
from pipeline.guidance.baselines.kld import kld_losses
from pipeline.guidance.baselines.rho1 import select_by_reference, select_by_self_reference
from pipeline.guidance.baselines.uld import truncated_pairs, uld_losses
from pipeline.guidance.cross_entropy import (
    TokenScores,
    linear_cross_entropy,
    map_token_chunks,
    score_tokens,
)
from pipeline.guidance.likelihood_matching import likelihood_divergences
from pipeline.models.hf_models import hidden_states
from pipeline.models.output_layer import output_layer
from pipeline.selection_rule import RANKED_BY_TEACHER, Selector
from pipeline.streaming import Rows
from pipeline.training.method import Method


@dataclass(frozen=True, kw_only=True)
class StudentPass:
    """A micro-batch that the student has read; the teacher reads it when a method asks.

    Attributes:
        method: whose loss is computed.
        student: trained.
        teacher: frozen; for rho1 the reference model; None also where rows hold its losses.
        batch: rows of `pipeline.streaming`, on the models' device.
        hidden: of the student, [rows, seq_length, H], with a gradient.
        scores: the labels' losses, with a gradient, and entropies where the rule ranks by them.
        rule: which tokens count, in a scope that `group` can serve.
        group: the processes that choose together; scope "group" only.
        step: of training; random choices are drawn anew for each.
        weight: λ of a divergence.
        vocab_size: of the tokenizer that kld's models share; their further rows are padding.
    """

    method: Method
    student: PreTrainedModel
    teacher: PreTrainedModel | None
    batch: Rows
    hidden: Tensor
    scores: TokenScores
    rule: SelectionRule
    group: dist.ProcessGroup | None
    step: int
    weight: float
    vocab_size: int | None

    @property
    def running_teacher(self) -> PreTrainedModel:
        """The teacher of a method that needs the model itself."""
        assert self.teacher is not None
        return self.teacher

    def teacher_losses(self) -> Tensor | None:
        """Return the losses that rows hold, or the teacher's own; NaN for padding.

        None where the rule does without.
        """
        if self.rule.selector not in RANKED_BY_TEACHER:
            return None
        if "teacher_losses" in self.batch:
            return self.batch["teacher_losses"].masked_fill(~self.batch.teacher_has_loss, torch.nan)
        return compute_teacher_losses(self.running_teacher, self.batch)

    def select(self, teacher_losses: Tensor | None) -> Selection:
        """Choose the labels that count, by the losses of `teacher_losses`."""
        batch, spans = self.batch, self.batch["teacher_spans"]
        guidance = mapped = None
        if teacher_losses is None:
            mapped = mapped_tokens(spans, batch.teacher_has_loss)
        else:
            guidance = aggregate_teacher_losses(
                teacher_losses,
                spans,
                self.method.aggregation,
                teacher_loss_mask=batch.teacher_has_loss,
            )
        return select_tokens(
            self.scores.losses,
            guidance,
            loss_mask=batch["loss_mask"],
            rule=self.rule,
            group=self.group,
            teacher_losses=teacher_losses,
            mapped=mapped,
            student_entropies=self.scores.entropies,
            step=self.step,
        )

    def selected_loss(self, selection: Selection) -> LossResult:
        """Return the cross entropy of the labels that count."""
        return guided_loss(self.scores.losses, selection, expectation=self.method.expectation)

    def with_divergences(self, divergences: Tensor, kept: Tensor | None = None) -> LossResult:
        """Return the cross entropy, of the kept labels if it is told which, plus divergences."""
        return distillation_loss(
            self.scores.losses,
            divergences,
            loss_mask=self.batch["loss_mask"],
            weight=self.weight,
            kept=kept,
        )


def compute_teacher_losses(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    """Return the teacher's loss of each of its own tokens, fp32 [rows, T]; NaN: none."""
    return score_tokens(
        _teacher_states(teacher, batch),
        output_layer(teacher),
        batch["teacher_input_ids"].long(),
        teacher_loss_mask=batch.teacher_has_loss,
    )


def student_states(model: PreTrainedModel, batch: Rows) -> Tensor:
    """Return a model's hidden states of the student's tokens, [rows, seq_length, H]."""
    return hidden_states(model, batch["input_ids"], position_ids=batch["position_ids"])


def score_labels(
    model: PreTrainedModel, hidden: Tensor, batch: Rows, *, with_entropy: bool = False
) -> TokenScores:
    """Return the losses of a batch's labels from a model's states of the student's tokens."""
    return linear_cross_entropy(
        hidden,
        output_layer(model),
        batch["labels"].long(),
        loss_mask=batch["loss_mask"],
        with_entropy=with_entropy,
    )


@torch.no_grad()
def losses_by_source(losses: Tensor, batch: Rows) -> dict[str, Tensor]:
    """Return the student's loss in each dataset of a mixture, over all labels, kept or not.

    Args:
        losses: float [rows, seq_length], nats.
        batch: of the same rows.

    Returns:
        `student_loss/NAME` for each, as metrics of `pipeline.guidance.LossResult`; nothing where
        rows are of one dataset.
    """
    names = batch.layout.sources
    if not names:
        return {}
    counted = batch["loss_mask"].bool()
    sums = torch.where(counted, losses, 0.0).double().sum(-1)
    pairs = torch.stack((sums, counted.sum(-1).double()), -1)
    by_source = pairs.new_zeros(len(names), 2).index_add_(0, batch["source"].long(), pairs)
    return {f"student_loss/{name}": each for name, each in zip(names, by_source, strict=True)}


@torch.no_grad()
def _teacher_states(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    """Return the teacher's hidden states of its own tokens."""
    return hidden_states(
        teacher, batch["teacher_input_ids"], position_ids=batch["teacher_position_ids"]
    )


@torch.no_grad()
def _reference_scores(given: StudentPass, *, with_entropy: bool = False) -> TokenScores:
    """Return what a teacher of the student's vocabulary makes of the same labels."""
    reference, batch = given.running_teacher, given.batch
    return score_labels(
        reference, student_states(reference, batch), batch, with_entropy=with_entropy
    )


def _of_selection(given: StudentPass) -> LossResult:
    return given.selected_loss(given.select(given.teacher_losses()))


def _alm(given: StudentPass) -> LossResult:
    batch, teacher_losses = given.batch, given.teacher_losses()
    assert teacher_losses is not None
    divergences = likelihood_divergences(
        given.scores.losses,
        teacher_losses,
        batch["teacher_spans"],
        loss_mask=batch["loss_mask"],
        teacher_loss_mask=batch.teacher_has_loss,
    )
    return given.with_divergences(divergences, given.select(teacher_losses).kept)


def _kld(given: StudentPass) -> LossResult:
    counted, teacher = given.batch["loss_mask"].bool(), given.running_teacher
    own, others = output_layer(given.student), output_layer(teacher)
    with torch.no_grad():
        reference = student_states(teacher, given.batch)
    values = map_token_chunks(
        lambda s, t: kld_losses(own.logits(s), others.logits(t), vocab_size=given.vocab_size),
        given.hidden[counted],
        reference[counted],
    )
    return given.with_divergences(values.new_zeros(counted.shape).masked_scatter(counted, values))


def _uld(given: StudentPass) -> LossResult:
    batch, teacher = given.batch, given.running_teacher
    own, others = output_layer(given.student), output_layer(teacher)
    bounds = (batch["cu_seqlens"], batch["teacher_cu_seqlens"])
    places, teacher_places = truncated_pairs(*map(_joined_bounds, bounds))
    counted = batch["loss_mask"].bool()
    used = counted.flatten()[places]
    values = map_token_chunks(
        lambda s, t: uld_losses(own.logits(s), others.logits(t)),
        given.hidden.flatten(0, 1)[places[used]],
        _teacher_states(teacher, batch).flatten(0, 1)[teacher_places[used]],
    )
    divergences = values.new_zeros(counted.numel()).index_copy(0, places[used], values)
    return given.with_divergences(divergences.view(counted.shape))


def _joined_bounds(cu_seqlens: Tensor) -> Tensor:
    """Return the segment bounds of all rows laid end to end; each row ends with its length."""
    seq_length = cu_seqlens[0, -1]
    starts = torch.arange(len(cu_seqlens), device=cu_seqlens.device) * seq_length
    bounds = cu_seqlens[:, :-1] + starts[:, None]
    return torch.cat([bounds.flatten(), (len(cu_seqlens) * seq_length).view(1)])


def _rho1(given: StudentPass) -> LossResult:
    selection = select_by_reference(
        given.scores.losses,
        _reference_scores(given).losses,
        loss_mask=given.batch["loss_mask"],
        rule=given.rule,
        group=given.group,
    )
    return given.selected_loss(selection)


def _rho1_self(given: StudentPass) -> LossResult:
    reference = _reference_scores(given, with_entropy=True)
    assert reference.entropies is not None
    selection = select_by_self_reference(
        reference.losses,
        reference.entropies,
        loss_mask=given.batch["loss_mask"],
        rule=given.rule,
        group=given.group,
    )
    return given.selected_loss(selection)


def _chunks(given: StudentPass) -> LossResult:
    num_chunks, batch = given.method.num_chunks, given.batch
    # Place t predicts token t + 1, so it belongs to that token's chunk.
    of_labels = row_chunk_ids(batch.student_is_text, num_chunks).roll(-1, dims=1)
    selection = select_chunks(
        given.scores.losses,
        given.teacher_losses(),
        student_chunk_ids=of_labels.masked_fill(~batch["loss_mask"].bool(), -1),
        teacher_chunk_ids=row_chunk_ids(batch.teacher_is_text, num_chunks),
        num_chunks=num_chunks,
        loss_mask=batch["loss_mask"],
        rule=given.rule,
        group=given.group,
        step=given.step,
    )
    return given.selected_loss(selection)


LOSSES: dict[str, Callable[[StudentPass], LossResult]] = {
    **dict.fromkeys(get_args(Selector), _of_selection),
    "alm": _alm,
    "kld": _kld,
    "uld": _uld,
    "rho1": _rho1,
    "rho1_self": _rho1_self,
    "chunks": _chunks,
    "chunks_random": _chunks,
}
"""By its name the loss of each of `pipeline.training.method.METHODS`."""
