"""A micro-batch for models of transformers, and their losses of its tokens."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.guidance import aggregate_teacher_losses
from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import TokenScores, linear_cross_entropy, score_tokens
from pipeline.losses.divergences import LabelDistributions
from pipeline.losses.loss_checks import check_finite
from pipeline.methods.label_distributions import ask_distributions, read_distributions
from pipeline.methods.micro_batch_loss import MicroBatchLoss
from pipeline.models.hf_models import hidden_states
from pipeline.models.output_layer import output_layer
from pipeline.streaming import Rows
from schemas.distribution_rule import NO_ENTRIES, EntryShape


@dataclass(frozen=True, kw_only=True)
class StudentPass(MicroBatchLoss):
    """A `MicroBatchLoss` of models of transformers.

    Attributes:
        teacher: frozen, or for rho1 the reference model; None if none runs.
        hidden: the student's states, [rows, seq_length, H], with a gradient.
        vocab_size: of the tokenizer that kld's models share; further rows are padding.
        vocabulary_map: of the rows' tokenizers, if a running teacher gives distributions.
        asked: the entries that such a teacher gives.
        all_learn: as in `MethodKind`.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel | None
    hidden: Tensor
    vocab_size: int | None
    with_distributions: bool = False
    vocabulary_map: VocabularyMap | None = None
    asked: EntryShape = NO_ENTRIES
    cells: Cells | None = None
    all_learn: bool = False

    @cached_property
    def scores(self) -> TokenScores:
        """See `MicroBatchLoss`."""
        return score_labels(
            self.student,
            self.hidden,
            self.batch,
            with_entropy=self.rule.ranks_by_entropy,
            known=self.distributions,
            all_learn=self.all_learn,
        )

    @cached_property
    def distributions(self) -> LabelDistributions | None:
        """See `MicroBatchLoss`; ValueError if neither the rows nor a teacher give them."""
        if not self.with_distributions:
            return None
        if "next_token_ids" in self.batch or self.teacher is None or self.vocabulary_map is None:
            found = read_distributions(self.batch)
        else:
            layer, tables = output_layer(self.teacher), self.vocabulary_map
            found = ask_distributions(self.teacher_states, layer, self.batch, tables, self.asked)
        return found if self.cells is None else found.in_cells(self.cells, self.batch["input_ids"])

    @property
    def known_losses(self) -> Tensor:
        """See `MicroBatchLoss`."""
        if "teacher_losses" in self.batch:
            losses = self.batch["teacher_losses"].masked_fill(~self.teacher_has_loss, torch.nan)
        else:
            losses = _losses_of_states(self.running_teacher, self.teacher_states, self.batch)
        if self.widest_span is not None:  # else whatever takes them checks them
            check_finite({"teacher_losses": (losses, self.teacher_has_loss | losses.isinf())})
        return losses

    @property
    def running_teacher(self) -> PreTrainedModel:
        """The teacher, for methods that need a model; ValueError without one."""
        if self.teacher is None:
            raise ValueError(
                f"method={self.method.name} finds no teacher_losses in the rows, and no model to "
                "ask: give teacher=, or, if losses suffice, read StreamConfig(teaching=Teaching("
                "stored_losses=…)) after `vocag score DATASET --teacher …`"
            )
        return self.teacher

    @cached_property
    def teacher_states(self) -> Tensor:
        """The running teacher's hidden states of its own tokens."""
        return _teacher_states(self.running_teacher, self.batch)

    @torch.no_grad()
    def reference_states(self) -> Tensor:
        """Return the teacher's states of the student's tokens; both share a vocabulary."""
        return student_states(self.running_teacher, self.batch)

    @torch.no_grad()
    def reference_scores(self, *, with_entropy: bool = False) -> TokenScores:
        """Return the teacher's scores of the student's labels."""
        return score_labels(
            self.running_teacher, self.reference_states(), self.batch, with_entropy=with_entropy
        )


def compute_teacher_losses(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    """Return the teacher's losses of its own tokens, fp32 [rows, T]; NaN: none."""
    return _losses_of_states(teacher, _teacher_states(teacher, batch), batch)


def mean_teacher_loss(teacher: PreTrainedModel, batch: Rows) -> float:
    """Return the teacher's mean loss over the labels that it covers, nats.

    Padding is left out: a good model may find it as unlikely as an untrained one finds all tokens.
    """
    guidance = aggregate_teacher_losses(
        compute_teacher_losses(teacher, batch),
        batch["teacher_spans"],
        "mean",
        teacher_loss_mask=batch.teacher_has_loss,
    )
    return float(guidance[batch["loss_mask"].bool()].nanmean())


def _losses_of_states(teacher: PreTrainedModel, states: Tensor, batch: Rows) -> Tensor:
    return score_tokens(
        states,
        output_layer(teacher),
        batch["teacher_input_ids"].long(),
        teacher_loss_mask=batch.teacher_has_loss,
    )


def student_states(model: PreTrainedModel, batch: Rows) -> Tensor:
    """Return a model's hidden states of the student's tokens, [rows, seq_length, H]."""
    return hidden_states(
        model,
        batch["input_ids"],
        position_ids=batch["position_ids"],
        on_host=None if batch.host is None else batch.host["position_ids"],
    )


def score_labels(
    model: PreTrainedModel,
    hidden: Tensor,
    batch: Rows,
    *,
    with_entropy: bool = False,
    known: LabelDistributions | None = None,
    all_learn: bool = False,
) -> TokenScores:
    """Score a batch's labels, and entries of `known`, by states of the student's tokens."""
    return linear_cross_entropy(
        hidden,
        output_layer(model),
        batch["labels"].long(),
        loss_mask=batch["loss_mask"],
        with_entropy=with_entropy,
        entry_ids=None if known is None else known.asked_of(batch["labels"]),
        cells=None if known is None else known.cells,
        all_learn=all_learn,
    )


@torch.no_grad()
def _teacher_states(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    return hidden_states(
        teacher,
        batch["teacher_input_ids"],
        position_ids=batch["teacher_position_ids"],
        on_host=None if batch.host is None else batch.host["teacher_position_ids"],
    )
