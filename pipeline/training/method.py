"""How a student's loss is made: the selectors of the paper and the systems it compares with."""

from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.selection import PAPER_RULE, Scope, SelectionRule, Selector, UnmappedStrategy

MethodName = Literal[
    "teacher", "full", "random", "student_loss", "student_entropy",
    "kld", "uld", "rho1", "rho1_entropy", "chunks", "chunks_random",
]  # fmt: skip
NEED_TEACHER = ("teacher", "kld", "uld", "rho1", "rho1_entropy", "chunks")
NEED_LOSSES = ("teacher", "chunks")  # of the teacher's own tokens, and nothing else of it
ONE_VOCABULARY = ("kld", "rho1", "rho1_entropy")
_SELECTORS: dict[str, Selector] = {
    "chunks": "teacher", "chunks_random": "random",
    "kld": "full", "uld": "full", "rho1": "full", "rho1_entropy": "full",
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """How the student's loss is made; the defaults are the paper's.

    Attributes:
        name: what chooses the tokens, or a baseline.
        keep_fraction: share of the competing tokens (or chunks) to keep.
        unmapped: what happens to tokens without guidance.
        scope: where the share is counted: each row, each process's micro-batch, or the
            micro-batches of all processes together (group).
        aggregation: Φ over a token's teacher losses.
        expectation: divide by the kept tokens or by all of them.
        num_chunks: of each document segment; methods chunks and chunks_random.
        weight: λ of kld and uld.
        seed: of random choices.
    """

    name: MethodName = "teacher"
    keep_fraction: float = PAPER_RULE.keep_fraction
    unmapped: UnmappedStrategy = PAPER_RULE.unmapped
    scope: Scope = PAPER_RULE.scope
    aggregation: Literal["mean", "max", "sum"] = "max"
    expectation: Literal["kept", "all"] = "kept"
    num_chunks: int = 32
    weight: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the name and the rule; the rest is checked where it is used."""
        if self.name not in get_args(MethodName):
            raise ValueError(f"--method {self.name}: choose of {', '.join(get_args(MethodName))}")
        _ = self.rule

    @property
    def rule(self) -> SelectionRule:
        """The selection rule."""
        selector = _SELECTORS.get(self.name, self.name)
        return SelectionRule(selector, self.keep_fraction, self.unmapped, self.scope, self.seed)  # type: ignore[arg-type]

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher, or its stored losses, are needed."""
        return self.name in NEED_TEACHER
