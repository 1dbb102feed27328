"""A micro-batch from which a method makes the loss, whatever runs the models."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from pipeline.guidance import (
    Selection,
    SelectionRule,
    aggregate_teacher_losses,
    guided_loss,
    mapped_tokens,
    select_tokens,
)
from pipeline.losses.cross_entropy import TokenScores
from pipeline.losses.distillation import distillation_loss
from pipeline.losses.divergences import LabelDistributions
from pipeline.losses.loss_result import LossResult
from pipeline.methods.method import Method
from pipeline.selection_rule import RANKED_BY_TEACHER
from pipeline.streaming import Rows


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoss(ABC):
    """A micro-batch that the student has read; the teacher's part is computed on request.

    Places are those of whole rows, even if ranks share them.

    Attributes:
        method: makes the loss.
        batch: on the models' device.
        rule: chooses tokens, in a scope that `group` can serve.
        group: the processes that choose together; scope `group` only.
        step: of training; random choices differ between steps.
        weight: λ of a divergence.
        widest_span: as in `aggregate_teacher_losses`.
    """

    method: Method
    batch: Rows
    rule: SelectionRule
    group: dist.ProcessGroup | None
    step: int
    weight: float
    widest_span: int | None = None

    @property
    @abstractmethod
    def scores(self) -> TokenScores:
        """The student's scores of the labels.

        Losses with a gradient; entropies if the rule ranks by them, log-probabilities if labels
        have distributions.
        """

    @property
    @abstractmethod
    def distributions(self) -> LabelDistributions | None:
        """The teacher's distributions of the labels; None if the method needs none."""

    @property
    @abstractmethod
    def known_losses(self) -> Tensor:
        """The teacher's losses of its own tokens, [rows, teacher_seq_length]; NaN: none."""

    @property
    def loss_mask(self) -> Tensor:
        """Which labels count, [rows, seq_length]."""
        return self.batch["loss_mask"]

    @property
    def teacher_has_loss(self) -> Tensor:
        """Which teacher tokens have a loss, bool [rows, teacher_seq_length]."""
        return self.batch.teacher_has_loss

    def teacher_losses(self) -> Tensor | None:
        """Return `known_losses`; None if the rule doesn't need them."""
        return self.known_losses if self.rule.selector in RANKED_BY_TEACHER else None

    def select(self, teacher_losses: Tensor | None) -> Selection:
        """Choose the labels to learn by the result of `teacher_losses`."""
        spans, has_loss = self.batch["teacher_spans"], self.teacher_has_loss
        guidance = mapped = None
        if teacher_losses is None:
            mapped = mapped_tokens(spans, has_loss, checked=self.widest_span is not None)
        else:
            guidance = aggregate_teacher_losses(
                teacher_losses,
                spans,
                self.method.aggregation,
                teacher_loss_mask=has_loss,
                widest_span=self.widest_span,
            )
        return select_tokens(
            self.scores.losses.detach(),
            guidance,
            loss_mask=self.loss_mask,
            rule=self.rule,
            group=self.group,
            teacher_losses=teacher_losses,
            mapped=mapped,
            entropies=self.scores.entropies,
            step=self.step,
        )

    def selected_loss(self, selection: Selection) -> LossResult:
        """Return the cross entropy of the chosen labels."""
        return guided_loss(self.scores.losses, selection, expectation=self.method.expectation)

    def with_divergences(self, divergences: Tensor, kept: Tensor | None = None) -> LossResult:
        """Return the cross entropy, of the `kept` labels if given, plus divergences."""
        return distillation_loss(
            self.scores.losses, divergences, loss_mask=self.loss_mask, weight=self.weight, kept=kept
        )
