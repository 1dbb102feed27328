"""The methods of training, each described once; no torch, so that options and help need none.

A new method is a line of `METHODS` and a loss in `pipeline.training.losses`. A new way to rank
tokens is a selector of `pipeline.guidance.selection`, and with it a method of both trainers.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.selection_rule import (
    PAPER_RULE,
    Aggregation,
    Expectation,
    Scope,
    SelectionRule,
    Selector,
    UnmappedStrategy,
)
from vocag_cli.options import Option


@dataclass(frozen=True)
class MethodKind:
    """What a method is, what it needs, and its defaults; `Method` are its options.

    Attributes:
        name: on the command line.
        help: what it does.
        selector: what the tokens (or chunks) are ranked by where the rule decides.
        needs: of the teacher: nothing, the losses of its own tokens, which may be stored, or the
            model itself.
        one_vocabulary: the teacher must have the student's.
        every_token: every token of the text must have a loss, the first one among them.
        keep_fraction: share to keep where none is given.
        weight: λ of the divergence, where there is one and no other is given.
    """

    name: str
    help: str
    selector: Selector = "full"
    needs: Literal["nothing", "losses", "model"] = "nothing"
    one_vocabulary: bool = False
    every_token: bool = False
    keep_fraction: float = PAPER_RULE.keep_fraction
    weight: float = 1.0

    def rule(self, method: "Method") -> SelectionRule:
        """Return the rule by which tokens are chosen, under these options."""
        share = self.keep_fraction if method.keep_fraction is None else method.keep_fraction
        return SelectionRule(self.selector, share, method.unmapped, method.scope, method.seed)


METHODS = {
    kind.name: kind
    for kind in (
        MethodKind(
            "teacher",
            "tokens on which the student is furthest behind the teacher: the paper",
            selector="teacher",
            needs="losses",
        ),
        MethodKind("full", "every token: plain continual pretraining, no teacher"),
        MethodKind("random", "chance: what a teacher must beat", selector="random"),
        MethodKind("student_loss", "the student's own judgement", selector="student_loss"),
        MethodKind("student_entropy", "likewise, by its entropy", selector="student_entropy"),
        MethodKind(
            "teacher_loss",
            "tokens that the teacher finds easiest",
            selector="teacher_loss",
            needs="losses",
        ),
        MethodKind(
            "alm",
            "match the teacher's likelihood of text, by its losses; no selection but beside it",
            selector="teacher",
            needs="losses",
            every_token=True,
            keep_fraction=0.0,  # no cross entropy but that of tokens without guidance
        ),
        MethodKind(
            "kld",
            "distillation by distributions (Eq. 5); a teacher of the student's vocabulary",
            needs="model",
            one_vocabulary=True,
        ),
        MethodKind(
            "uld",
            "distillation by sorted probabilities (Eq. 6), any vocabulary",
            needs="model",
            weight=0.5,
        ),
        MethodKind(
            "rho1",
            "Rho-1 with a reference model of the student's vocabulary",
            needs="model",
            one_vocabulary=True,
            keep_fraction=0.6,  # of its 1B model's tokens
        ),
        MethodKind(
            "rho1_self",
            "Rho-1's self-reference: easy for the reference by loss and by entropy",
            needs="model",
            one_vocabulary=True,
            keep_fraction=0.7,  # by each
        ),
        MethodKind(
            "chunks",
            "equal chunks in place of alignment (Table 2), by the teacher",
            selector="teacher",
            needs="losses",
        ),
        MethodKind("chunks_random", "equal chunks, by chance", selector="random"),
    )
}


@dataclass(frozen=True)
class Method:
    """How the student's loss is made; the defaults are the paper's.

    Attributes:
        name: what chooses the tokens, or a baseline; listed below.
        keep_fraction: share of the competing tokens (or chunks) to keep; by default 0.4, of rho1
            0.6, of rho1_self 0.7 by loss and by entropy; of alm 0, no cross entropy but that of
            tokens without guidance.
        unmapped: what happens to tokens without guidance.
        scope: where the share is counted: each row, each process's micro-batch, or the
            micro-batches of all processes together (group).
        aggregation: Φ over a token's teacher losses.
        expectation: divide by the kept tokens or by all of them.
        num_chunks: of each row; methods chunks and chunks_random.
        weight: λ of kld, uld and alm; by default 1.0 for kld (Eq. 5) and alm, 0.5 for uld (Eq. 6).
        seed: of random choices.
    """

    name: Annotated[str, Option("METHOD", form="itself")] = "teacher"
    keep_fraction: float | None = None
    unmapped: UnmappedStrategy = PAPER_RULE.unmapped
    scope: Scope = PAPER_RULE.scope
    aggregation: Aggregation = "max"
    expectation: Expectation = "kept"
    num_chunks: int = 32
    weight: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the name and the rule; the rest is checked where it is used."""
        if self.name not in METHODS:
            raise ValueError(f"--method {self.name}: choose one of {', '.join(METHODS)}")
        METHODS[self.name].rule(self)
