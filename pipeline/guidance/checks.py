"""Checks that the loss modules share: a broken input is named, with its row, before it spreads."""

import torch
import torch.distributed as dist
from torch import Tensor


class NonFiniteLossError(ValueError):
    """A model gave NaN or an infinite loss for a token that counts."""


def check_finite(
    tensors: dict[str, tuple[Tensor, Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Raise NonFiniteLossError, with the rows, for NaN and infinite values where a mask counts.

    Each name's tensors are values [rows, T] and the bool mask [rows, T] of those that count. A
    group shares the finding, so that every rank raises and none waits for a broken one.
    """
    num_broken = count_broken(tensors)
    if group is not None:
        dist.all_reduce(num_broken, group=group)
    refuse_broken(tensors, num_broken)


def count_broken(tensors: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return how many values that count are NaN or infinite, int64 scalar; see `check_finite`."""
    return torch.stack([bad.sum() for bad in _broken(tensors).values()]).sum()


def refuse_broken(tensors: dict[str, tuple[Tensor, Tensor]], num_broken: Tensor) -> None:
    """Raise NonFiniteLossError, with the rows, if values are broken, `num_broken` on all ranks."""
    if not int(num_broken):
        return
    for name, bad in _broken(tensors).items():
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


def _broken(tensors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: ~values.isfinite() & mask for name, (values, mask) in tensors.items()}


def check_same_shape(student_losses: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError for tensors that aren't of the same tokens; None is skipped."""
    for name, other in others.items():
        if other is not None and other.shape != student_losses.shape:
            raise ValueError(
                f"{name} {tuple(other.shape)} must have the shape of student_losses "
                f"{tuple(student_losses.shape)}"
            )
