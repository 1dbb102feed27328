"""Records compared: bits per byte, differences paired by seed, intervals, tables.

Two intervals of 95 %: Student's t over seeds, and a bootstrap over documents.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.stats import t as student_t

DRAWS = 10_000
Records = dict[str, dict[int, dict[str, Any]]]
"""A run's record by arm and seed."""


@dataclass(frozen=True)
class Difference:
    """One arm less another, in bits per byte; NaN where there is too little for an interval.

    Attributes:
        values: by seed.
        mean: of the values.
        error: standard error of the mean, over seeds.
        half_width: of the interval by Student's t.
        low: end of the interval by bootstrap over documents.
        high: its other end.
    """

    values: dict[int, float]
    mean: float
    error: float
    half_width: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_below_zero(self) -> bool:
        """Whether every seed and both intervals say that the first arm needs fewer bits."""
        below = all(value < 0 for value in self.values.values())
        return below and self.mean + self.half_width < 0 and self.high < 0

    def __str__(self) -> str:
        """Return mean and intervals: +0.071 ± 0.001 [+0.060, +0.080]."""
        text = f"{self.mean:+.3f}"
        text += "" if math.isnan(self.half_width) else f" ± {self.half_width:.3f}"
        return text + ("" if math.isnan(self.low) else f" [{self.low:+.3f}, {self.high:+.3f}]")


def read_records(folder: Path) -> Records:
    """Return the records that are there."""
    found: Records = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text("utf-8"))
        if "measured" not in record:  # what a search of rates found lies next to the records
            continue
        found.setdefault(record["arm"], {})[record["seed"]] = record
    return found


def bits_per_byte(record: dict[str, Any], held_out: str, at: str = "best") -> float:
    """Return a run's bits per byte of a set, at its best unit or a named one."""
    sums = _sums(record, held_out, at)
    return sum(sums["nats"]) / math.log(2) / sum(sums["bytes"])


def _sums(record: dict[str, Any], held_out: str, at: str) -> dict[str, list[float]]:
    name = {"best": record["best"], "last": record["units"]}.get(at, at)
    sums: dict[str, list[float]] = record["measured"][str(name)][held_out]
    return sums


def compare(
    own: dict[int, dict[str, Any]],
    other: dict[int, dict[str, Any]],
    held_out: str,
    at: str = "best",
) -> Difference:
    """Return how two arms differ on a set, over the seeds that both have."""
    seeds = sorted(own.keys() & other.keys())
    values = {
        seed: bits_per_byte(own[seed], held_out, at) - bits_per_byte(other[seed], held_out, at)
        for seed in seeds
    }
    low = high = math.nan
    if seeds:
        low, high = bootstrap(
            [_sums(own[seed], held_out, at) for seed in seeds],
            [_sums(other[seed], held_out, at) for seed in seeds],
        )
    return Difference(values, *paired(values.values()), low, high)


def paired(differences: Iterable[float]) -> tuple[float, float, float]:
    """Return mean, standard error and half the 95 % interval by Student's t; NaN where unknown.

    Example:
        >>> mean, error, half = paired([1.0, 2.0, 3.0])
        >>> mean, round(error, 4), round(half / error, 2)
        (2.0, 0.5774, 4.3)
    """
    values = list(differences)
    if not values:
        return math.nan, math.nan, math.nan
    if len(values) == 1:
        return values[0], math.nan, math.nan
    error = stdev(values) / math.sqrt(len(values))
    return fmean(values), error, error * t_quantile(len(values))


@cache
def t_quantile(num_seeds: int) -> float:
    """Return how many standard errors 95 % need on each side: 4.30 for three seeds.

    Example:
        >>> round(t_quantile(3), 2)
        4.3
    """
    return float(student_t.ppf(0.975, num_seeds - 1))


def bootstrap(
    own: Sequence[dict[str, list[float]]], other: Sequence[dict[str, list[float]]]
) -> tuple[float, float]:
    """Return the 95 % interval of a difference in bits per byte when documents are drawn again.

    The documents are the same for both arms and all seeds, and are drawn together.

    Args:
        own: sums of the first arm, one entry a seed.
        other: those of the second.
    """
    num_bytes = np.array(own[0]["bytes"])
    nats = np.mean(
        [np.subtract(a["nats"], b["nats"]) for a, b in zip(own, other, strict=True)], axis=0
    )
    count = len(num_bytes)
    draws = np.random.default_rng(0).multinomial(count, [1 / count] * count, size=DRAWS)
    found = draws @ nats / math.log(2) / (draws @ num_bytes)
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)


def overview(records: Records, sets: Sequence[str], plain: str, at: str = "best") -> str:
    """Return every arm's mean bits per byte, and its difference to a plain arm."""
    rows = []
    trained = {arm: own for arm, own in records.items() if "rate" in next(iter(own.values()))}
    for arm, own in trained.items():
        cells: list[object] = [f"`{arm}`", len(own), f"{next(iter(own.values()))['rate']:g}"]
        cells.append(", ".join(str(record["best"]) for record in own.values()))
        for name in sets:
            mean = f"{fmean(bits_per_byte(record, name, at) for record in own.values()):.3f}"
            differs = arm != plain and plain in records
            less = f" ({compare(own, records[plain], name, at)})" if differs else ""
            cells.append(mean + less)
        rows.append(cells)
    return table(["arm", "seeds", "rate", "best", *sets], rows)


def both_overviews(records: Records, sets: Sequence[str], plain: str) -> str:
    """Return the overviews at each run's best unit and at its end, with their headings."""
    parts = []
    for at, title in (
        ("best", "at the unit that is best on the development set"),
        ("last", "at the end"),
    ):
        parts += [f"## Bits per byte {title}", ""]
        parts += [f"In parentheses: less `{plain}`, ± Student's t, [bootstrap over documents].", ""]
        parts += [overview(records, sets, plain, at)]
    return "\n".join(parts)


def best_arm(records: Records, names: Iterable[str]) -> str:
    """Return the arm with the fewest bits per byte on the development set, best units' mean."""
    means = {
        name: fmean(min(record["development"]) for record in records[name].values())
        for name in names
    }
    return min(means, key=means.__getitem__)
