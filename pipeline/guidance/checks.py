"""Checks that the loss modules share: a broken input is named, with its row, before it spreads."""

from __future__ import annotations

from typing import get_args

import torch.distributed as dist
from torch import Tensor


class NonFiniteLossError(ValueError):
    """A model gave NaN or an infinite loss for a token that counts."""


def check_finite(
    tensors: dict[str, tuple[Tensor, Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Refuse NaN and infinite values where a mask counts.

    Args:
        tensors: by name, values [rows, T] and the bool mask [rows, T] of those that count.
        group: share the finding, so that every rank raises and none waits for a broken one.

    Raises:
        NonFiniteLossError: names the rows.

    Example:
        >>> check_finite({"student_losses": (student_losses, loss_mask)})
    """
    broken = {name: ~values.isfinite() & mask for name, (values, mask) in tensors.items()}
    num_broken = sum(bad.sum() for bad in broken.values())
    assert isinstance(num_broken, Tensor)
    if group is not None:
        dist.all_reduce(num_broken, group=group)
    if not int(num_broken):
        return
    for name, bad in broken.items():
        places = bad.nonzero().tolist()
        if places:
            row, position = places[0]
            value = float(tensors[name][0][row, position])
            raise NonFiniteLossError(
                f"{name}[{row}, {position}] is {value}; {len(places)} such values in rows "
                f"{sorted({row for row, _ in places})}: the model diverged, its weights did not "
                "load, or the mask counts tokens that it never scored"
            )
    raise NonFiniteLossError(
        f"{' or '.join(tensors)} of another rank are NaN or infinite; that rank's error names the "
        "row"
    )


def check_same_shape(student_losses: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that don't belong to the same tokens; None is skipped.

    Raises:
        ValueError: names the tensor and both shapes.
    """
    for name, other in others.items():
        if other is not None and other.shape != student_losses.shape:
            raise ValueError(
                f"{name} {tuple(other.shape)} must have the shape of student_losses "
                f"{tuple(student_losses.shape)}"
            )


def check_choice(name: str, value: str, choices: object) -> None:
    """Refuse a value that its Literal type doesn't list.

    Raises:
        ValueError: lists the choices.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}; got {value!r}")
