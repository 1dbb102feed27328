"""Options of guidance, and the rule for choosing tokens; no torch.

Source: VocAgnoLM (arXiv 2503.19123), Eq. 4 and section 6.2.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.command_line.option_parsing import require_known

Selector = Literal[
    "teacher",
    "full",
    "random",
    "student_loss",
    "student_entropy",
    "teacher_loss",
    "teacher_entropy",
]
UnmappedStrategy = Literal["include", "exclude", "mean"]
Scope = Literal["row", "microbatch", "group"]
Aggregation = Literal["mean", "max", "sum"]
Expectation = Literal["kept", "all"]

RANKED_BY_TEACHER: tuple[Selector, ...] = ("teacher", "teacher_loss")
"""Selectors that rank by the teacher's losses, and can't do without them."""
RANKED_BY_ENTROPY: tuple[Selector, ...] = ("student_entropy", "teacher_entropy")
"""Selectors that rank by the entropy of one model's predictions."""


@dataclass(frozen=True)
class SelectionRule:
    """How tokens are chosen; the defaults are the paper's.

    Attributes:
        selector: what competing tokens are ranked by, highest first. `teacher`: student loss minus
            teacher loss (Eq. 4). `teacher_loss`: what the teacher finds easiest. `student_loss`,
            `student_entropy`: these alone. `teacher_entropy`: where the teacher is least certain,
            if its distributions are known. `random`: a hash of seed, step and position. `full`: all
            are kept (plain continual pretraining).
        keep_fraction: share of the competing tokens to keep, rounded down.
        unmapped: tokens without guidance (section 6.2), with every selector but `full`. `include`:
            all are kept, too. `exclude`: none is. `mean`: they compete with the scope's mean
            teacher token loss as guidance.
        scope: the paper's batch, in which the fraction is counted and *mean* averages: each `row`,
            this process's `microbatch`, or all ranks' micro-batches of a process `group` (data- and
            context-parallel).
        seed: of the `random` selector.
    """

    selector: Selector = "teacher"
    keep_fraction: float = 0.4
    unmapped: UnmappedStrategy = "include"
    scope: Scope = "microbatch"
    seed: int = 0

    def __post_init__(self) -> None:
        require_known("selector=", [self.selector], get_args(Selector))
        require_known("unmapped=", [self.unmapped], get_args(UnmappedStrategy))
        require_known("scope=", [self.scope], get_args(Scope))
        if not 0.0 <= self.keep_fraction <= 1.0:
            raise ValueError(
                f"keep_fraction must lie in 0..1, got {self.keep_fraction}: 40 % is written 0.4"
            )

    @property
    def ranks_by_entropy(self) -> bool:
        """Whether the student's entropy is needed."""
        return self.selector == "student_entropy"


PAPER_RULE = SelectionRule()
