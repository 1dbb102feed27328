"""A micro-batch through the student and, if asked, its teacher: what losses are made of."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.guidance.cross_entropy import TokenScores, linear_cross_entropy, score_tokens
from pipeline.guidance.output_layer import OutputLayer
from pipeline.guidance.rule import RANKED_BY_TEACHER, SelectionRule
from pipeline.models.hf_models import hidden_states
from pipeline.models.output_layer import output_layer
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
    def layer(self) -> OutputLayer:
        """The student's output layer."""
        return output_layer(self.student)

    @property
    def teacher_layer(self) -> OutputLayer:
        """The teacher's output layer."""
        assert self.teacher is not None
        return output_layer(self.teacher)

    def teacher_losses(self) -> Tensor | None:
        """Return the losses that rows hold, or the teacher's own; NaN for padding.

        None where the rule does without.
        """
        if self.rule.selector not in RANKED_BY_TEACHER:
            return None
        if "teacher_losses" in self.batch:
            return self.batch["teacher_losses"].masked_fill(~self.batch.teacher_has_loss, torch.nan)
        assert self.teacher is not None
        return compute_teacher_losses(self.teacher, self.batch)

    @torch.no_grad()
    def teacher_states(self) -> Tensor:
        """Return the teacher's hidden states of its own tokens."""
        assert self.teacher is not None
        return _teacher_states(self.teacher, self.batch)

    @torch.no_grad()
    def reference_states(self) -> Tensor:
        """Return the hidden states that a teacher of the student's vocabulary has of its tokens."""
        assert self.teacher is not None
        return student_states(self.teacher, self.batch)

    @torch.no_grad()
    def reference_scores(self, *, with_entropy: bool = False) -> TokenScores:
        """Return what a teacher of the student's vocabulary makes of the same labels."""
        return score_labels(
            self.reference_states(), self.teacher_layer, self.batch, with_entropy=with_entropy
        )


@torch.no_grad()
def compute_teacher_losses(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    """Return the teacher's loss of each of its own tokens, fp32 [rows, T]; NaN: none."""
    return score_tokens(
        _teacher_states(teacher, batch),
        output_layer(teacher),
        batch["teacher_input_ids"].long(),
        teacher_loss_mask=batch.teacher_has_loss,
    )


def score_labels(
    hidden: Tensor, layer: OutputLayer, batch: Rows, *, with_entropy: bool
) -> TokenScores:
    """Return the losses of a batch's labels from hidden states of the student's tokens."""
    return linear_cross_entropy(
        hidden,
        layer,
        batch["labels"].long(),
        loss_mask=batch["loss_mask"],
        with_entropy=with_entropy,
    )


def student_states(model: PreTrainedModel, batch: Rows) -> Tensor:
    """Return a model's hidden states of the student's tokens, [rows, seq_length, H]."""
    return hidden_states(model, batch["input_ids"], position_ids=batch["position_ids"])


def _teacher_states(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    return hidden_states(
        teacher, batch["teacher_input_ids"], position_ids=batch["teacher_position_ids"]
    )
