"""Which student tokens count, by the losses of a teacher (Eq. 2 to 4)."""

from pipeline.guidance.aggregation import aggregate_teacher_losses, has_context
from pipeline.guidance.checks import NonFiniteLossError
from pipeline.guidance.loss import LossResult, guided_loss, mapped_tokens, metric_values
from pipeline.guidance.selection import Selection, select_tokens
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
