"""Checks of losses: a broken one is named, with its row, before it spreads.

A trainer puts them off to the end of a step, where the host waits for the device anyway.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor


class NonFiniteLossError(ValueError):
    """NaN or an infinite loss of a token that counts."""


_OF_ANOTHER = "{} of another rank are NaN or infinite; that rank's error names the row"


class Checks:
    """Checks that are put off; `flags` are bool scalars on the device, True if broken."""

    def __init__(self) -> None:
        """Begin without checks."""
        self.flags: list[Tensor] = []
        self._explanations: list[Callable[[], None]] = []

    def add(self, flag: Tensor, explain: Callable[[], None]) -> None:
        """Add a flag, and a function that raises its error."""
        self.flags.append(flag)
        self._explanations.append(explain)

    def count(self, like: Tensor) -> Tensor:
        """Return how many flags are set, of the type of `like`; processes add it up."""
        return torch.stack([like.new_zeros(()), *self.flags]).sum()

    def look(self, num_broken: float = 0) -> None:
        """Read the flags, for which the host waits once, and `refuse` them."""
        self.refuse(torch.stack(self.flags).tolist() if self.flags else [], num_broken)

    def refuse(self, flags: Sequence[float], num_broken: float = 0) -> None:
        """Raise the error of the first flag that is set, given their values.

        `num_broken` counts those of all processes: another's error is raised here, too.
        """
        for flag, explain in zip(flags, self._explanations, strict=True):
            if flag:
                explain()
        if num_broken:
            raise NonFiniteLossError(_OF_ANOTHER.format("losses"))


_put_off: ContextVar[Checks | None] = ContextVar("checks", default=None)


@contextmanager
def put_off(checks: Checks | None = None) -> Iterator[Checks]:
    """Collect the checks made inside the block, after those of `checks`, to be read together."""
    checks = checks or Checks()
    token = _put_off.set(checks)
    try:
        yield checks
    finally:
        _put_off.reset(token)


def refuse_any(broken: Tensor, explain: Callable[[], None]) -> None:
    """Let `explain` raise if any is broken: at once, or when checks put off are read."""
    flag = broken.any()
    checks = _put_off.get()
    if checks is not None:
        checks.add(flag, explain)
    elif bool(flag):
        explain()


def check_finite(
    tensors: dict[str, tuple[Tensor, Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Raise NonFiniteLossError, with the rows, for NaN and infinite values where a mask counts.

    Each name has values and a bool mask, [rows, T]. In a group every rank raises.
    """
    num_broken = count_broken(tensors)
    if group is not None:
        dist.all_reduce(num_broken, group=group)
    refuse_broken(tensors, num_broken)


def count_broken(tensors: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Count NaN and infinite values where masks count, int64 scalar."""
    return torch.stack([bad.sum() for bad in _broken(tensors).values()]).sum()


def refuse_broken(tensors: dict[str, tuple[Tensor, Tensor]], num_broken: Tensor) -> None:
    """Raise NonFiniteLossError, with the rows, if `num_broken` of all ranks isn't 0."""
    refuse_any(num_broken, partial(_refuse_broken, tensors))


def _refuse_broken(tensors: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, bad in _broken(tensors).items():
        places = bad.nonzero().tolist()
        if places:
            row, position = places[0]
            value = float(tensors[name][0][row, position])
            raise NonFiniteLossError(
                f"{name}[{row}, {position}] is {value}; {len(places)} such values in rows "
                f"{sorted({row for row, _ in places})} of its micro-batch: the model diverged, "
                "its weights did not load, or the mask counts tokens that it never scored"
            )
    raise NonFiniteLossError(_OF_ANOTHER.format(" or ".join(tensors)))


def _broken(tensors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: ~values.isfinite() & mask for name, (values, mask) in tensors.items()}


def check_same_shape(student_losses: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless shapes are equal; None is skipped."""
    for name, other in others.items():
        if other is not None and other.shape != student_losses.shape:
            raise ValueError(
                f"{name} {tuple(other.shape)} must have the shape of student_losses "
                f"{tuple(student_losses.shape)}"
            )
