"""What the losses of all methods are made of: a micro-batch as a student and its teacher see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.guidance import (
    LossResult,
    Selection,
    SelectionRule,
    aggregate_teacher_losses,
    guided_loss,
    mapped_tokens,
    select_tokens,
)
from pipeline.guidance.baselines.distillation import distillation_loss
from pipeline.guidance.cross_entropy import TokenScores, linear_cross_entropy, score_tokens
from pipeline.models.hf_models import hidden_states
from pipeline.models.output_layer import output_layer
from pipeline.selection_rule import RANKED_BY_TEACHER
from pipeline.streaming import Rows
from pipeline.training.distributions import (
    LabelDistributions,
    ask_distributions,
    read_distributions,
)
from pipeline.training.method import ONLINE_TOP_K, Method


@dataclass(frozen=True, kw_only=True)
class StudentPass:
    """A micro-batch that the student has read; the teacher reads it when a method asks.

    Attributes:
        method: whose loss is computed.
        student: trained.
        teacher: frozen; for rho1 the reference model; None also where rows hold its losses.
        batch: rows of `pipeline.streaming`, on the models' device.
        hidden: of the student, [rows, seq_length, H], with a gradient.
        rule: which tokens count, in a scope that `group` can serve.
        group: the processes that choose together; scope "group" only.
        step: of training; random choices are drawn anew for each.
        weight: λ of a divergence.
        vocab_size: of the tokenizer that kld's models share; their further rows are padding.
        with_distributions: whether labels' distributions are wanted.
        vocabulary_map: of the rows' tokenizers, if a running teacher gives distributions.
    """

    method: Method
    student: PreTrainedModel
    teacher: PreTrainedModel | None
    batch: Rows
    hidden: Tensor
    rule: SelectionRule
    group: dist.ProcessGroup | None
    step: int
    weight: float
    vocab_size: int | None
    with_distributions: bool = False
    vocabulary_map: VocabularyMap | None = None

    @cached_property
    def scores(self) -> TokenScores:
        """The labels' losses, with a gradient, and what else the method asks of the student.

        Entropies where the rule ranks by them, log-probabilities where labels have distributions.
        """
        return score_labels(
            self.student,
            self.hidden,
            self.batch,
            with_entropy=self.rule.ranks_by_entropy,
            entry_ids=None if self.distributions is None else self.distributions.ids,
        )

    @cached_property
    def distributions(self) -> LabelDistributions | None:
        """What the teacher expects in place of each label; None if the method does without.

        Raises:
            ValueError: neither the rows nor a teacher say so.
        """
        if not self.with_distributions:
            return None
        if "next_token_ids" in self.batch or self.teacher is None or self.vocabulary_map is None:
            return read_distributions(self.batch)
        top_k = self.method.top_k or ONLINE_TOP_K
        layer = output_layer(self.teacher)
        return ask_distributions(self.teacher_states, layer, self.batch, self.vocabulary_map, top_k)

    @property
    def running_teacher(self) -> PreTrainedModel:
        """The teacher of a method that needs the model itself."""
        assert self.teacher is not None
        return self.teacher

    @cached_property
    def teacher_states(self) -> Tensor:
        """The running teacher's hidden states of its own tokens."""
        return _teacher_states(self.running_teacher, self.batch)

    @torch.no_grad()
    def reference_states(self) -> Tensor:
        """Return what a teacher of the student's vocabulary makes of the student's tokens."""
        return student_states(self.running_teacher, self.batch)

    @torch.no_grad()
    def reference_scores(self, *, with_entropy: bool = False) -> TokenScores:
        """Return what a teacher of the student's vocabulary makes of the same labels."""
        return score_labels(
            self.running_teacher, self.reference_states(), self.batch, with_entropy=with_entropy
        )

    def teacher_losses(self) -> Tensor | None:
        """Return the losses that rows hold, or the teacher's own; NaN for padding.

        None if the rule does without.
        """
        if self.rule.selector not in RANKED_BY_TEACHER:
            return None
        if "teacher_losses" in self.batch:
            return self.batch["teacher_losses"].masked_fill(~self.batch.teacher_has_loss, torch.nan)
        return _losses_of_states(self.running_teacher, self.teacher_states, self.batch)

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
    return _losses_of_states(teacher, _teacher_states(teacher, batch), batch)


def _losses_of_states(teacher: PreTrainedModel, states: Tensor, batch: Rows) -> Tensor:
    return score_tokens(
        states,
        output_layer(teacher),
        batch["teacher_input_ids"].long(),
        teacher_loss_mask=batch.teacher_has_loss,
    )


def student_states(model: PreTrainedModel, batch: Rows) -> Tensor:
    """Return a model's hidden states of the student's tokens, [rows, seq_length, H]."""
    return hidden_states(model, batch["input_ids"], position_ids=batch["position_ids"])


def score_labels(
    model: PreTrainedModel,
    hidden: Tensor,
    batch: Rows,
    *,
    with_entropy: bool = False,
    entry_ids: Tensor | None = None,
) -> TokenScores:
    """Return the losses of a batch's labels from a model's states of the student's tokens."""
    return linear_cross_entropy(
        hidden,
        output_layer(model),
        batch["labels"].long(),
        loss_mask=batch["loss_mask"],
        with_entropy=with_entropy,
        entry_ids=entry_ids,
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
