"""What a method of training is. Only types come from where models run, so --help loads none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.guidance import PAPER_RULE, LossResult, SelectionRule
from pipeline.guidance.rule import Selector
from pipeline.training.method import Method

if TYPE_CHECKING:
    from pipeline.training.student_pass import StudentPass


@dataclass(frozen=True)
class MethodKind:
    """What a method needs, its defaults, and its loss; `Method` are its options.

    Attributes:
        name: on the command line.
        loss: of a micro-batch, from the student's forward pass.
        selector: what the tokens (or chunks) are ranked by where the rule decides.
        needs: of the teacher: nothing, the losses of its own tokens, which may be stored, or the
            model itself.
        one_vocabulary: the teacher must have the student's.
        every_token: every token of the text must have a loss, the first one among them.
        keep_fraction: share to keep where none is given.
        weight: λ of the divergence, where there is one and no other is given.
    """

    name: str
    loss: Callable[[StudentPass], LossResult]
    selector: Selector = "full"
    needs: Literal["nothing", "losses", "model"] = "nothing"
    one_vocabulary: bool = False
    every_token: bool = False
    keep_fraction: float = PAPER_RULE.keep_fraction
    weight: float = 1.0

    def rule(self, method: Method) -> SelectionRule:
        """Return the rule by which tokens are chosen, under these options."""
        share = self.keep_fraction if method.keep_fraction is None else method.keep_fraction
        return SelectionRule(self.selector, share, method.unmapped, method.scope, method.seed)
