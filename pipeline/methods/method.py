"""The options of the student's loss."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pipeline.command_line.option_parsing import Option, require_known
from pipeline.selection_rule import (
    PAPER_RULE,
    Aggregation,
    Expectation,
    Scope,
    SelectionRule,
    Selector,
    UnmappedStrategy,
)
from schemas.distribution_rule import DRAWS, MOST_ENTRIES, EntryShape

DistillTokens = Literal["all", "kept", "dropped"]
DistillMap = Literal["cells", "prefix"]
DistillBy = Literal["teacher", "student_entropy", "teacher_entropy", "random"]

WHICH_METHOD = """\
full: plain training, for plenty of clean new text; with --where, for a noisy corpus
distill: for a model with a new tokenizer (--weight 0.5), or few documents and many passes
teacher, the paper's selection: lost to full here; docs/evidence.md has every result"""
"""Three lines for those who name no method: no default would be right."""


@dataclass(frozen=True)
class Method:
    """How the student's loss is made; the defaults of its options are the paper's.

    Attributes:
        name: what to learn from the teacher, or a baseline; listed below.
        keep_fraction: share of the competing tokens (or chunks) to keep (default: 0.4; for rho1
            0.6; for rho1_self 0.7, by loss and by entropy; for alm 0: cross entropy only of tokens
            without guidance).
        unmapped: what happens to tokens without guidance.
        scope: what the share is counted over: each row, each process's micro-batch, or the
            micro-batches of all processes together (group).
        aggregation: how a token's teacher losses become one: Φ.
        expectation: divide by the kept tokens or by all of them.
        num_chunks: chunks of each row; for chunks and chunks_random.
        weight: λ of kld, uld, alm and distill (default: 1.0 for kld (Eq. 5) and alm, 0.5 for uld
            (Eq. 6), 0.8 for distill, which gives the rest to cross entropy).
        seed: seed of random choices.
        distill_map: what a teacher's token means to distill: cells, the set of student tokens that
            its place in the data shows, of which the text says which one it was; or prefix, the
            longest one that its bytes begin with, which experiments compare with.
        distill_tokens: which labels distill learns by the teacher's distribution: all that have
            one, those that a selection keeps, or those that it drops; the others are learned by
            cross entropy.
        distill_by: what that selection ranks labels by, highest first: student loss minus teacher
            loss (the paper's; default); or, among labels with a distribution, the entropy of the
            student's prediction (SE-KD) or of the teacher's, or chance.
        temperature: flattens both models' distributions; for distill.
        reverse_kl: KL(student || teacher) in place of KL(teacher || student); for distill.
    """

    name: Annotated[str, Option("METHOD", form="itself", missing=WHICH_METHOD)]
    keep_fraction: float | None = None
    unmapped: UnmappedStrategy = PAPER_RULE.unmapped
    scope: Scope = PAPER_RULE.scope
    aggregation: Aggregation = "max"
    expectation: Expectation = "kept"
    num_chunks: int = 32
    weight: float | None = None
    seed: int = 0
    distill_map: DistillMap = "cells"
    distill_tokens: DistillTokens = "all"
    distill_by: DistillBy | None = None
    temperature: float = 1.0
    reverse_kl: bool = False

    def __post_init__(self) -> None:
        """Check all but the name, which `kind_of` checks."""
        self.rule("full", PAPER_RULE.keep_fraction)
        require_known("distill_map=", [self.distill_map], get_args(DistillMap))
        require_known("distill_tokens=", [self.distill_tokens], get_args(DistillTokens))
        if self.distill_by is not None:
            require_known("distill_by=", [self.distill_by], get_args(DistillBy))
            if self.distill_tokens == "all":
                raise ValueError(
                    f"distill_by={self.distill_by} chooses nothing where all are learned: add "
                    "distill_tokens=kept or dropped, or leave it out"
                )
        if self.weight is not None and not 0 <= self.weight < float("inf"):
            raise ValueError(f"weight={self.weight} must be 0 or more and finite")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be above 0 and finite")

    def entries_of(self, top_k: int, draws: int | None) -> EntryShape:
        """Return the entries to request of a teacher; `draws` of None: a default number."""
        if draws is None:
            draws = DRAWS if self._is_linear and top_k + DRAWS < MOST_ENTRIES else 0
        asked = EntryShape(top_k + 1, draws)
        self.require_learnable(asked)
        return asked

    def require_learnable(self, entries: EntryShape) -> None:
        """Raise ValueError if these options can't learn from such entries."""
        if entries.drawn and not self._is_linear:
            name = "reverse_kl" if self.reverse_kl else f"temperature={self.temperature}"
            raise ValueError(
                f"{name} needs a teacher without draws: draws are right on average, and what isn't "
                "linear in the teacher's probabilities has another mean; leave it out, or use "
                "distributions without draws (vocag score --draws 0)"
            )

    @property
    def _is_linear(self) -> bool:
        return self.temperature == 1 and not self.reverse_kl

    def draw_of(self, number: int, rank: int, num_ranks: int) -> int:
        """Number the random choices of a rank's `number`th micro-batch; a group's are common."""
        return number if self.scope == "group" else number * num_ranks + rank

    def rule(self, selector: Selector, keep_fraction: float) -> SelectionRule:
        """Return the rule for choosing tokens, with a default share."""
        share = keep_fraction if self.keep_fraction is None else self.keep_fraction
        return SelectionRule(selector, share, self.unmapped, self.scope, self.seed)
