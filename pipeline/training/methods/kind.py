"""What a method of training is; no torch, so that options and help need none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.selection_rule import PAPER_RULE, SelectionRule, Selector
from pipeline.training.method import Method

if TYPE_CHECKING:
    from pipeline.guidance import LossResult
    from pipeline.training.losses import StudentPass


@dataclass(frozen=True)
class MethodKind:
    """What a method is, what it needs, and its defaults; `Method` are its options.

    Attributes:
        name: on the command line.
        help: what it does.
        loss: of a micro-batch; it imports what needs torch.
        selector: what the tokens (or chunks) are ranked by where the rule decides.
        needs: of the teacher: nothing, the losses of its own tokens, or its distributions, both of
            which may be stored, or the model itself.
        one_vocabulary: the teacher must have the student's.
        every_token: every token of the text must have a loss, the first one among them.
        keep_fraction: share to keep if none is given.
        weight: λ of the divergence, if there is one and no other is given.
        options: fields of `Method` that are only for this method and others that name them.
    """

    name: str
    help: str
    loss: Callable[[StudentPass], LossResult]
    selector: Selector = "full"
    needs: Literal["nothing", "losses", "distributions", "model"] = "nothing"
    one_vocabulary: bool = False
    every_token: bool = False
    keep_fraction: float = PAPER_RULE.keep_fraction
    weight: float = 1.0
    options: tuple[str, ...] = ()

    @property
    def takes_stored(self) -> bool:
        """Whether what it needs of a teacher may have been stored."""
        return self.needs in ("losses", "distributions")

    def rule(self, method: Method) -> SelectionRule:
        """Return the rule by which tokens are chosen, under these options."""
        return method.rule(self.selector, self.keep_fraction)
