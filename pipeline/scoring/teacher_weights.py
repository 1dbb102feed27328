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
) -> tuple[float, ...]:
    """Return the teachers' shares of a mean, adding up to 1; none for a choice.

    Args:
        names: the stored losses; None if a run has none.
        weights: of each, with any sum; none weighs all alike.
        choice: how they become one.

    Raises:
        ValueError: not a positive weight for each teacher, a sum that is too large for a number,
            weights for a choice, or either without stored losses.

    Example:
        >>> check_teachers(("1.5B", "7B"), (1, 3), "mean")
        (0.25, 0.75)
    """
    if names is None:
        if weights or choice != "mean":
            raise ValueError(
                "teacher_weights and teacher_choice are for several stored_losses, and none are "
                "given: leave them out"
            )
        return ()
    if choice == "likelier":
        if weights:
            raise ValueError("teacher_weights are for a mean: leave them or teacher_choice out")
        return ()
    count = 1 if isinstance(names, str) else len(names)
    given = tuple(weights) or (1.0,) * count
    shown = f"teacher_weights={' '.join(map(str, given))}"
    if len(given) != count or not all(0 < weight < inf for weight in given):
        raise ValueError(
            f"{shown} must be one positive number for each of the {count} stored_losses"
        )
    if sum(given) == inf:
        raise ValueError(f"{shown} add up to more than a number holds: divide them all by 10")
    return tuple(weight / sum(given) for weight in given)
