"""How several teachers' stored losses become one teacher's; no numpy."""

from collections.abc import Sequence
from math import inf
from typing import Literal

TeacherChoice = Literal["mean", "likelier"]
"""How several teachers become one: their weighted mean, or of each document the one that finds it
likelier."""


def check_teachers(
    names: str | Sequence[str] | None,
    weights: Sequence[float],
    choice: TeacherChoice,
    *,
    prefix: str = "--",
) -> tuple[float, ...]:
    """Return the teachers' shares of a mean, adding up to 1; none for a choice.

    Args:
        names: the stored losses; None if a run has none.
        weights: of each, with any sum; none weighs all alike.
        choice: how they become one.
        prefix: of the options that messages name.

    Raises:
        ValueError: not a positive weight for each teacher, a sum that is too large for a number,
            weights for a choice, or either without stored losses.

    Example:
        >>> check_teachers(("1.5B", "7B"), (1, 3), "mean")
        (0.25, 0.75)
    """
    option = f"{prefix}teacher-weights"
    if names is None:
        if weights or choice != "mean":
            raise ValueError(
                f"{option} and {prefix}teacher-choice are for several {prefix}stored-losses, and "
                "none are given: leave them out"
            )
        return ()
    if choice == "likelier":
        if weights:
            raise ValueError(f"{option} are for a mean: leave them or {prefix}teacher-choice out")
        return ()
    count = 1 if isinstance(names, str) else len(names)
    given = tuple(weights) or (1.0,) * count
    shown = f"{option} {' '.join(map(str, given))}"
    if len(given) != count or not all(0 < weight < inf for weight in given):
        raise ValueError(
            f"{shown} must be one positive number for each of the {count} {prefix}stored-losses"
        )
    if sum(given) == inf:
        raise ValueError(f"{shown} add up to more than a number holds: divide them all by 10")
    return tuple(weight / sum(given) for weight in given)
