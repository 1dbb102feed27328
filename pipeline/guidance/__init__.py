"""Which student tokens count, by the losses of a teacher (Eq. 2 to 4)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.guidance.rule import PAPER_RULE, Aggregation, Expectation, SelectionRule

if TYPE_CHECKING:
    from pipeline.guidance.aggregation import aggregate_teacher_losses, has_context
    from pipeline.guidance.checks import NonFiniteLossError
    from pipeline.guidance.loss import LossResult, guided_loss, mapped_tokens, metric_values
    from pipeline.guidance.selection import Selection, select_tokens

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

_NEED_TORCH = {
    "LossResult": "loss",
    "NonFiniteLossError": "checks",
    "Selection": "selection",
    "aggregate_teacher_losses": "aggregation",
    "guided_loss": "loss",
    "has_context": "aggregation",
    "mapped_tokens": "loss",
    "metric_values": "loss",
    "select_tokens": "selection",
}
"""Modules of what is imported once it is used: options and their help do without torch."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
