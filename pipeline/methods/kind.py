"""The description of a training method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeline.command_line.failures import hinted
from pipeline.methods.method import Method
from pipeline.packing.reading import Reading
from pipeline.scoring.teaching import ONLINE_TOP_K, Teaching
from pipeline.selection_rule import PAPER_RULE, SelectionRule, Selector
from schemas.distribution_rule import NO_ENTRIES, EntryShape

if TYPE_CHECKING:
    from pipeline.losses.loss_result import LossResult
    from pipeline.streaming import AlignedRows

Needs = Literal["nothing", "losses", "distributions", "model"]


class Served(NamedTuple):
    """A run's source of teacher data; a running teacher gives `entries` of each distribution."""

    by: Literal["nothing", "stored", "running"]
    with_distributions: bool = False
    entries: EntryShape = NO_ENTRIES


@dataclass(frozen=True)
class MethodKind:
    """A method's identity, needs and defaults; `Method` has its options.

    Attributes:
        name: on the command line.
        help: its description there.
        loss: takes a `MicroBatchLoss`, or a `StudentPass` if it needs the model; imports torch
            itself.
        selector: ranks the tokens (or chunks) if the rule decides.
        needs: from the teacher: nothing, its tokens' losses or distributions, possibly stored, or
            the model itself.
        one_vocabulary: whether the teacher must share the student's.
        every_token: whether every token of the text, including the first, must have a loss.
        all_learn: whether nearly every label gets a gradient.
        keep_fraction: default share to keep.
        chooses: whether some tokens (or chunks) are chosen, by the rule.
        unread: options of choosing that its choice doesn't read.
        weight: default λ of the divergence.
        largest_weight: where the rest of λ is cross entropy's, 1.
        options: fields of `Method` read only by the kinds that name them.
        known: this project's findings that a user should hear before a run.
    """

    name: str
    help: str
    loss: Callable[[Any], LossResult]
    selector: Selector = "full"
    needs: Needs = "nothing"
    one_vocabulary: bool = False
    every_token: bool = False
    all_learn: bool = False
    keep_fraction: float = PAPER_RULE.keep_fraction
    chooses: bool = True
    unread: tuple[str, ...] = ()
    weight: float = 1.0
    largest_weight: float = float("inf")
    options: tuple[str, ...] = ()
    known: str = ""

    def rule(self, method: Method) -> SelectionRule:
        """Return the rule for choosing tokens."""
        return method.rule(method.distill_by or self.selector, self.keep_fraction)

    def weight_of(self, method: Method) -> float:
        """Return the given or default λ."""
        return self.weight if method.weight is None else method.weight

    def chooses_by(self, method: Method) -> bool:
        """Whether it chooses tokens with these options."""
        return self.chooses and (
            "distill_tokens" not in self.options or method.distill_tokens != "all"
        )

    def unread_by(self, method: Method) -> tuple[str, ...]:
        """Return the options of choosing that it doesn't read with these options."""
        by_teacher = method.distill_by in (None, "teacher")
        return self.unread if by_teacher else (*self.unread, "unmapped", "aggregation")

    def uses_cells(self, method: Method) -> bool:
        """Whether it needs cells of both vocabularies, counted on data."""
        return self.needs == "distributions" and method.distill_map == "cells"

    def serve(
        self, method: Method, teaching: Teaching, data: Reading | None = None, seq_length: int = 0
    ) -> Served:
        """Return how a run by this method gets its teacher data.

        ValueError if these teachers don't fit the method or its options; a hint may name the data's
        scores, or how to make some for rows of `seq_length` tokens.
        """
        stored, running = teaching.stored_losses is not None, bool(teaching.teacher)
        if stored and self.needs in ("nothing", "model"):
            need = "a teacher that runs" if self.needs == "model" else "no teacher"
            raise ValueError(
                f"stored_losses are given, and method={self.name} needs {need}: leave them out"
            )
        for name, value in (("top_k", teaching.top_k), ("draws", teaching.draws)):
            if value and self.needs != "distributions":
                error = ValueError(
                    f"{name}={value} is for methods that learn next tokens, such as "
                    f"method=distill: leave it out with {self.name}"
                )
                raise hinted(error, f"leave out {name}=")
        if self.needs == "nothing":
            return Served("nothing")
        if not (stored or running):
            raise self._without_teacher(data, seq_length)
        if stored or self.needs != "distributions":
            return Served("stored" if stored else "running", self.needs == "distributions")
        top_k = teaching.top_k or ONLINE_TOP_K
        return Served("running", True, method.entries_of(top_k, teaching.draws))

    def row_needs(self, method: Method, served: Served) -> dict[str, Any]:
        """Return the fields of `StreamConfig` that make rows hold a run's needs."""
        return {
            "with_distributions": served == Served("stored", with_distributions=True),
            "with_cells": self.uses_cells(method),
        }

    def require_rows(self, method: Method, rows: AlignedRows) -> None:
        """Raise ValueError unless the method can learn from rows.

        A text's first token may lack a loss, stored distributions may not suit the options, or the
        teacher may read other tokens than the student.
        """
        if self.one_vocabulary:
            _require_one_vocabulary(self.name, rows)
        method.require_learnable(rows.layout.entries)
        student = rows.rules.student
        before = (student.first_token_id, student.continued_token_id)
        if self.every_token and not rows.layout.of_chats and None in before:
            raise ValueError(
                f"method={self.name} compares the likelihoods of whole texts, but without a token "
                "before it a text's first token has none: name one by student_bos"
            )

    def _without_teacher(self, data: Reading | None, seq_length: int) -> ValueError:
        if self.needs == "model":
            error = ValueError(f"method={self.name} needs a teacher that runs")
            return hinted(error, "teacher=MODEL")
        hint = 'stored_losses=""'
        if data is not None:
            from pipeline.dataset.score_files import scores_to_paste  # only for an error

            hint = scores_to_paste(
                data.mixture().datasets[0].path,
                with_distributions=self.needs == "distributions",
                seq_length=seq_length,
            )
        error = ValueError(f"method={self.name} needs a teacher, or stored_losses of one")
        return hinted(error, hint)


def _require_one_vocabulary(method: str, rows: AlignedRows) -> None:
    path, manifest = rows.config.reading.path, rows.manifest
    if manifest.student.sha256 != manifest.teacher.sha256:
        raise ValueError(
            f"method={method} needs a teacher with the student's tokenizer, but {path} was aligned "
            f"with {manifest.teacher.source}: run vocag align again with the student's tokenizer "
            "for both"
        )
    chats = manifest.chats
    if chats is not None and chats.student != replace(chats.teacher, file=chats.student.file):
        raise ValueError(
            f"method={method} lets the teacher read the student's tokens, and {path} has two chat "
            "templates: choose another method, or run vocag align again with one --chat-template "
            "for both"
        )
