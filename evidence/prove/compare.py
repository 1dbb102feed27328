"""Records compared: bits per byte, differences paired by seed, intervals, tables.

Two intervals of 95 %: Student's t over seeds, and a bootstrap over documents and seeds. Three seeds
that happen to agree make the first one too narrow; the second one knows how documents differ.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student_t

DRAWS = 10_000
Records = dict[str, dict[int, dict[str, Any]]]
"""A run's record by arm and seed."""
Ratio = tuple[ArrayLike, ArrayLike]
"""Gains [seeds, documents], and what they are a share of [documents]."""


@dataclass(frozen=True)
class Difference:
    """One arm less another, in bits per byte; NaN where there is too little for an interval.

    Attributes:
        values: by seed.
        mean: of the values.
        half_width: of the interval by Student's t.
        low: end of the interval by bootstrap over documents and seeds.
        high: its other end.
    """

    values: Mapping[int, float]
    mean: float
    half_width: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_below_zero(self) -> bool:
        """Whether every seed and both intervals say that the first arm needs fewer bits."""
        below = all(value < 0 for value in self.values.values())
        return below and self.mean + self.half_width < 0 and self.high < 0

    @property
    def is_above_zero(self) -> bool:
        """Whether every seed and both intervals say that the first arm has more."""
        above = all(value > 0 for value in self.values.values())
        return above and self.mean - self.half_width > 0 and self.low > 0

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
        if "measured" in record:  # what a search of rates found lies next to the records
            found.setdefault(record["arm"], {})[record["seed"]] = record
    return found


def find_missing(records: Records, arms: Iterable[str], num_seeds: int = 3) -> str:
    """Return the arms that lack seeds, and how many each has: `full 2 of 3, alm 0 of 3`.

    Example:
        >>> find_missing({"full": {0: {}, 1: {}, 2: {}}}, ["full", "alm"])
        'alm 0 of 3'
    """
    counts = {arm: len(records.get(arm, {})) for arm in arms}
    return ", ".join(f"{a} {n} of {num_seeds}" for a, n in counts.items() if n < num_seeds)


def bits_per_byte(record: Mapping[str, Any], held_out: str, at: str = "best") -> float:
    """Return a run's bits per byte of a set, at its best unit or a named one."""
    sums = sums_of(record, held_out, at)
    return math.fsum(sums["nats"]) / math.log(2) / math.fsum(sums["bytes"])


def sums_of(record: Mapping[str, Any], held_out: str, at: str) -> dict[str, list[Any]]:
    """Return `bytes` and `nats` of every document of a set, and what else there is, at a unit."""
    name = {"best": record["best"], "last": record["units"]}.get(at, at)
    sums: dict[str, list[Any]] = record["measured"][str(name)][held_out]
    return sums


def compare(records: Records, own: str, other: str, held_out: str, at: str = "best") -> Difference:
    """Return how two arms differ on a set, over the seeds that both have."""
    seeds = common_seeds(records, own, other)
    if not seeds:
        return Difference({}, *paired([]))
    num_bytes = [sums_of(records[own][seed], held_out, at)["bytes"] for seed in seeds]
    nats = nats_less(records, own, other, held_out, at)
    return difference_of(seeds, [(nats, math.log(2) * np.array(num_bytes))])


def common_seeds(records: Records, own: str, other: str) -> list[int]:
    """Return the seeds that two arms have."""
    return sorted(records.get(own, {}).keys() & records.get(other, {}).keys())


def nats_less(records: Records, own: str, other: str, held_out: str, at: str) -> NDArray[Any]:
    """Return one arm's nats less another's, float64 [common seeds, documents]."""
    seeds = common_seeds(records, own, other)
    ours, theirs = (
        [sums_of(records[arm][seed], held_out, at)["nats"] for seed in seeds]
        for arm in (own, other)
    )
    return np.subtract(ours, theirs)


def difference_of(seeds: Sequence[int], sets: Sequence[Ratio]) -> Difference:
    """Return a mean over sets of ratios, by seed, with both intervals.

    Args:
        seeds: of the gains.
        sets: as in `bootstrap`.
    """
    by_set = [np.asarray(gains).sum(1) / np.asarray(wholes).sum(-1) for gains, wholes in sets]
    values = dict(zip(seeds, np.mean(by_set, 0).tolist(), strict=True))
    return Difference(values, *paired(values.values()), *bootstrap(sets))


def paired(differences: Iterable[float]) -> tuple[float, float]:
    """Return the mean, and half the 95 % interval by Student's t; NaN where unknown.

    Three values need 4.30 standard errors, not 2.

    Example:
        >>> mean, half = paired([1.0, 2.0, 3.0])
        >>> mean, round(half * math.sqrt(3), 2)
        (2.0, 4.3)
    """
    values = list(differences)
    half = math.nan
    if len(values) > 1:
        error = stdev(values) / math.sqrt(len(values))
        half = error * float(student_t.ppf(0.975, len(values) - 1))
    return fmean(values) if values else math.nan, half


def bootstrap(sets: Sequence[Ratio]) -> tuple[float, float]:
    """Return the 95 % interval of a mean of ratios when documents and seeds are drawn again.

    The seeds are the same for all sets and are drawn once; each set's documents are drawn once for
    all seeds. A draw's value is the mean over sets and the seeds drawn of gains / wholes, both
    added up over the documents drawn.

    Args:
        sets: for each set gains [seeds, documents] and wholes [documents], or [seeds, documents]
            where seeds have different documents. Of a difference in bits per byte: nats, and the
            bytes' number times ln 2.

    Example:
        >>> bootstrap([([[2.0, 4.0], [2.0, 4.0]], [1.0, 2.0])])
        (2.0, 2.0)
    """
    order = np.random.default_rng(0)
    seeds = _drawn(order, len(np.asarray(sets[0][0])))
    found = np.zeros(DRAWS)
    for gains, wholes in sets:
        documents = _drawn(order, np.shape(gains)[1])
        by_seed = documents @ np.asarray(gains).T / (documents @ np.atleast_2d(wholes).T)
        found += (by_seed * seeds).sum(1) / len(sets)
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def _drawn(order: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return how often each of `count` is drawn in as many draws, as shares [DRAWS, count]."""
    return order.multinomial(count, [1 / count] * count, size=DRAWS) / count


def best_arm(records: Records, names: Iterable[str]) -> str:
    """Return the arm with the fewest bits per byte on the development set, best units' mean."""
    means = {
        name: fmean(min(record["development"]) for record in records[name].values())
        for name in names
    }
    return min(means, key=means.__getitem__)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)


def overview(records: Records, sets: Sequence[str], plain: str, at: str, title: str) -> str:
    """Return every arm's mean bits per byte, and its difference to a plain arm, with a heading."""
    rows = []
    for arm, own in records.items():
        first = next(iter(own.values()))
        if "rate" not in first:  # what no arm has trained
            continue
        best = ", ".join(str(record["best"]) for record in own.values())
        cells: list[object] = [f"`{arm}`", len(own), f"{first['rate']:g}", best]
        for name in sets:
            mean = f"{fmean(bits_per_byte(record, name, at) for record in own.values()):.3f}"
            less = f" ({compare(records, arm, plain, name, at)})"
            cells.append(mean + (less if arm != plain and plain in records else ""))
        rows.append(cells)
    said = f"In parentheses: less `{plain}`, ± Student's t, [bootstrap over documents and seeds]."
    head = table(["arm", "seeds", "rate", "best", *sets], rows)
    return f"\n## Bits per byte {title}\n\n{said}\n\n{head}"


def both_overviews(records: Records, sets: Sequence[str], plain: str) -> str:
    """Return the overviews at each run's best unit and at its end."""
    best = "at the unit that is best on the development set"
    parts = [overview(records, sets, plain, "best", best)]
    return "".join([*parts, overview(records, sets, plain, "last", "at the end")])
