"""How a student's loss is made: the selectors of the paper and the systems it compares with."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pipeline.guidance.rule import (
    PAPER_RULE,
    Aggregation,
    Direction,
    Expectation,
    Scope,
    SelectionRule,
    Selector,
    UnmappedStrategy,
)
from vocag_cli.options import Option

MethodName = Literal[
    Selector, "alm", "kld", "uld", "rho1", "rho1_self", "chunks", "chunks_random",
]  # fmt: skip
"""Those that `pipeline.training.methods` lists."""


@dataclass(frozen=True)
class Method:
    """How the student's loss is made; the defaults are the paper's.

    Attributes:
        name: what chooses the tokens, or a baseline.
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
        kld_direction: reverse is KL(student || teacher), Eq. 5; forward KL(teacher || student).
        seed: of random choices.
    """

    name: Annotated[MethodName, Option(form="itself")] = "teacher"
    keep_fraction: float | None = None
    unmapped: UnmappedStrategy = PAPER_RULE.unmapped
    scope: Scope = PAPER_RULE.scope
    aggregation: Aggregation = "max"
    expectation: Expectation = "kept"
    num_chunks: int = 32
    weight: float | None = None
    kld_direction: Direction = "reverse"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the name and the rule; the rest is checked where it is used."""
        if self.name not in get_args(MethodName):
            raise ValueError(f"--method {self.name}: choose of {', '.join(get_args(MethodName))}")
        share = PAPER_RULE.keep_fraction if self.keep_fraction is None else self.keep_fraction
        SelectionRule(keep_fraction=share, unmapped=self.unmapped, scope=self.scope)
