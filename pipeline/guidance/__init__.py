"""Choose the student tokens that count, by a teacher's losses (Eq. 2 to 4)."""

from pipeline.guidance.aggregation import aggregate_teacher_losses
from pipeline.guidance.loss import guided_loss, mapped_tokens
from pipeline.guidance.selection import Selection, select_tokens
from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.losses.loss_result import LossResult, metric_values
from pipeline.losses.spans import has_context
from pipeline.selection_rule import PAPER_RULE, Aggregation, Expectation, SelectionRule

__all__ = [
    "PAPER_RULE",
    "Aggregation",
    "Expectation",
    "LossResult",
    "NonFiniteLossError",
    "Selection",
    "SelectionRule",
    "aggregate_teacher_losses",
    "guided_loss",
    "has_context",
    "mapped_tokens",
    "metric_values",
    "select_tokens",
]
