"""The options of a run's teacher, declared once for every trainer; no numpy."""

from dataclasses import dataclass
from math import inf
from os import PathLike, fspath
from typing import Annotated, Literal, get_args

from pipeline.command_line.failures import hinted
from pipeline.command_line.option_parsing import ModelSource, Option, require_known
from schemas.distribution_rule import MOST_ENTRIES

TeacherChoice = Literal["mean", "likelier"]
"""How several teachers become one: their weighted mean, or of each document the one that finds it
likelier."""
ONLINE_TOP_K = 16
"""Next tokens that a running teacher is asked for if nothing else is given."""


@dataclass(frozen=True)
class Teaching:
    """Who teaches: a model that runs, or the losses that `vocag score` has stored of one or more.

    Attributes:
        teacher: folder, repository or .gguf file; for rho1 the reference model.
        stored_losses: losses from vocag score, in place of a teacher: a score manifest or a
            teacher's name; "" if there is only one; several teachers are read as one.
        teacher_weights: positive weights of several teachers in their mean, with any sum
            (default: equal).
        teacher_choice: read several teachers' mean, or for each document the teacher that finds it
            likelier.
        top_k: number of likeliest tokens that a running teacher gives, for methods that learn them
            (default: 16; stored distributions have as many as were stored).
        draws: tokens that a running teacher also draws from what its top_k leave out; distill then
            follows its whole distribution on average (default: 4; none with a temperature or the
            reverse divergence).

    Example:
        >>> Teaching(stored_losses=("1.5B", "7B"), teacher_weights=(1, 3)).shares
        (0.25, 0.75)
    """

    teacher: ModelSource | None = None
    stored_losses: Annotated[str | tuple[str, ...], Option("NAME")] | None = None
    teacher_weights: tuple[float, ...] = ()
    teacher_choice: TeacherChoice = "mean"
    top_k: int | None = None
    draws: int | None = None

    def __post_init__(self) -> None:
        for name in ("teacher", "stored_losses"):
            if (value := getattr(self, name)) is not None:
                several = not isinstance(value, str | PathLike)
                plain = tuple(map(fspath, value)) if several else fspath(value)
                object.__setattr__(self, name, plain)
        require_known("teacher_choice=", [self.teacher_choice], get_args(TeacherChoice))
        if self.stored_losses is None:
            if self.teacher_weights or self.teacher_choice != "mean":
                raise ValueError(
                    "teacher_weights and teacher_choice are for several stored_losses, and none "
                    "are given: leave them out"
                )
        elif self.teacher:
            error = ValueError(
                f"teacher={self.teacher} and stored_losses are given: choose one of them"
            )
            raise hinted(error, "leave out teacher=")
        elif self.top_k is not None:
            error = ValueError(
                f"top_k={self.top_k} is for a running teacher: stored distributions have as many "
                "tokens as vocag score --top-k gave them; leave it out"
            )
            raise hinted(error, "leave out top_k=")
        if self.top_k is not None and not 1 <= self.top_k <= MOST_ENTRIES:
            raise ValueError(f"top_k={self.top_k} must lie in 1..{MOST_ENTRIES}")
        self._check_draws()
        self._check_weights()

    @property
    def names(self) -> tuple[str, ...]:
        """Each teacher's stored losses; empty without any."""
        stored = self.stored_losses or ()
        return (self.stored_losses,) if isinstance(self.stored_losses, str) else tuple(stored)

    @property
    def shares(self) -> tuple[float, ...]:
        """The teachers' shares of a mean, adding up to 1; empty for a choice."""
        if self.teacher_choice == "likelier":
            return ()
        given = self.teacher_weights or (1.0,) * len(self.names)
        return tuple(weight / sum(given) for weight in given)

    def _check_draws(self) -> None:
        if not self.draws:
            return
        if not self.teacher:
            error = ValueError(
                f"draws={self.draws} is for a running teacher: stored distributions have as many "
                "as vocag score --draws gave them; leave it out"
            )
            raise hinted(error, "leave out draws=")
        most = MOST_ENTRIES - 1 - (self.top_k or ONLINE_TOP_K)
        if not 1 <= self.draws <= most:
            raise ValueError(f"draws={self.draws} must lie in 1..{most}, what top_k leaves")

    def _check_weights(self) -> None:
        weights, count = self.teacher_weights, len(self.names)
        shown = f"teacher_weights={' '.join(map(str, weights))}"
        if weights and self.teacher_choice == "likelier":
            raise ValueError("teacher_weights are for a mean: leave them or teacher_choice out")
        if weights and (len(weights) != count or not all(0 < weight < inf for weight in weights)):
            raise ValueError(
                f"{shown} must be one positive number for each of the {count} stored_losses"
            )
        if sum(weights) == inf:
            raise ValueError(f"{shown} add up to more than a number holds: divide them all by 10")


NOBODY = Teaching()
