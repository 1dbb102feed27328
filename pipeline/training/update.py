"""Refuse a step that would ruin the student's weights."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.losses.loss_checks import NonFiniteLossError

logger = logging.getLogger(__name__)


class NonFiniteGradientError(NonFiniteLossError):
    """A gradient is NaN or infinite although the losses aren't."""


@contextmanager
def naming_step(step: int, num_rows: int, learning_rate: float) -> Iterator[None]:
    """Add step (from 0), its `num_rows` rows and rate to errors of non-finite values."""
    try:
        yield
    except NonFiniteLossError as error:
        rows = f"rows {step * num_rows} to {(step + 1) * num_rows - 1} of the run"
        raise type(error)(
            f"step {step + 1} ({rows}, learning rate {learning_rate:g}): {error}; lower the "
            "learning rate if the loss had grown, else look at these rows"
        ) from error


def divide_gradients(model: nn.Module, divisor: float | Tensor) -> None:
    """Divide gradients in place; a scalar on the device avoids a wait."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, divisor)


def check_gradient(norm: float) -> None:
    """Raise NonFiniteGradientError before the update, in all processes."""
    if not math.isfinite(norm):
        raise NonFiniteGradientError(
            f"the gradient's norm is {norm}, so the step isn't made, and the last checkpoint stays"
        )
    if norm == 0:
        logger.warning(
            "a step kept no token, so nothing is learned: raise the share that is kept"
            ", or rows a step if chats have long prompts"
        )
