"""The order of a mixture: pure arithmetic.

Weights, shares of student tokens, become shares of rows by each dataset's mean row: whole numbers
of `PERIOD`, so any row is found in a table of one period.

A *stretch* is a run of rows with the same shares. It ends with its stage, or when a dataset is used
up.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline.packing.kernels import interleave
from pipeline.packing.mixture_file import Stage

PERIOD = 1 << 20
"""Rows after which the order of datasets repeats: shares are exact to one row of these."""


@dataclass(frozen=True)
class Source:
    """A dataset's rows and student tokens per epoch, padding excluded.

    `max_epochs` None means endlessly.
    """

    name: str
    num_rows: int
    num_tokens: int
    max_epochs: int | None = 1

    @property
    def total_rows(self) -> int | None:
        """Rows of all epochs; None if endless."""
        return None if self.max_epochs is None else self.num_rows * self.max_epochs

    @property
    def tokens_per_row(self) -> Fraction:
        """Mean student tokens of a row."""
        return Fraction(self.num_tokens, self.num_rows)


@dataclass(frozen=True)
class Stretch:
    """Rows `start` to before `stop` (None: endless) with fixed shares of `PERIOD` rows per source.

    `counts` are each source's rows before it.
    """

    stage: int
    start: int
    stop: int | None
    shares: tuple[int, ...]
    counts: tuple[int, ...]

    def locate(self, run_position: int) -> tuple[int, int]:
        """Return a row's source, and that source's rows before it."""
        if len(self.shares) == 1:
            return 0, self.counts[0] + run_position - self.start
        period, place = divmod(run_position - self.start, PERIOD)
        source_of, before = _turns(self.shares)
        source = int(source_of[place])
        return source, self.counts[source] + period * self.shares[source] + int(before[place])

    def counts_before(self, run_position: int) -> tuple[int, ...]:
        """Return each source's rows before a run position."""
        period, place = divmod(run_position - self.start, PERIOD)
        source_of, _ = _turns(self.shares)
        inside = np.bincount(source_of[:place], minlength=len(self.shares)).tolist()
        columns = zip(self.counts, self.shares, inside, strict=True)
        return tuple(count + period * share + rest for count, share, rest in columns)

    def position_of(self, source: int, source_position: int) -> int:
        """Return the run position of a source's row in an endless stretch."""
        period, before = divmod(source_position - self.counts[source], self.shares[source])
        places = np.flatnonzero(_turns(self.shares)[0] == source)
        return self.start + period * PERIOD + int(places[before])


@dataclass(frozen=True, eq=False)
class MixturePlan:
    """A run's rows as consecutive stretches."""

    sources: tuple[Source, ...]
    stretches: tuple[Stretch, ...]

    @property
    def num_rows(self) -> int | None:
        """Rows of the run; None if endless."""
        return self.stretches[-1].stop

    def locate(self, run_position: int) -> tuple[int, int]:
        """Return a row's source, and its number over all the source's epochs."""
        return self.stretch_at(run_position).locate(run_position)

    def counts_before(self, run_position: int) -> tuple[int, ...]:
        """See `Stretch.counts_before`; the position may be the end."""
        return self.stretch_at(run_position).counts_before(run_position)

    def tokens_before(self, run_position: int) -> tuple[int, ...]:
        """Return each source's student tokens before a run position, by its mean row."""
        counts = self.counts_before(run_position)
        pairs = zip(counts, self.sources, strict=True)
        return tuple(round(count * source.tokens_per_row) for count, source in pairs)

    def stretch_at(self, run_position: int) -> Stretch:
        """Return a position's stretch."""
        place = bisect_right(self.stretches, run_position, key=lambda stretch: stretch.start)
        return self.stretches[place - 1]


def plan_mixture(sources: Sequence[Source], stages: Sequence[Stage]) -> MixturePlan:
    """Plan a mixture's rows; ValueError for an unreachable stage or too small a share."""
    stretches: list[Stretch] = []
    counts = (0,) * len(sources)
    start, stage = 0, 0
    while shares := _shares(sources, stages[stage], counts):
        stretch = Stretch(stage, start, None, shares, counts)
        used_up = _first_used_up(sources, stretch)
        stage_end = _next_stage(sources, stages, stretch)
        ends = [end for end in (used_up, stage_end) if end is not None]
        if not ends:
            return MixturePlan(tuple(sources), (*stretches, stretch))
        stop = min(ends)
        if stop > start:
            stretches.append(Stretch(stage, start, stop, shares, counts))
        counts, start = stretch.counts_before(stop), stop
        stage += stop == stage_end
    if stage + 1 < len(stages):
        tokens = round(_tokens(sources, counts))
        raise ValueError(
            f"stage {stage + 2} begins at {stages[stage + 1].from_tokens} student tokens, but the "
            f"datasets of stage {stage + 1} are used up after {tokens}: raise their max_epochs, "
            f"or begin stage {stage + 2} earlier"
        )
    if stage and stretches[-1].stage < stage:
        raise ValueError(
            f"the datasets of stage {stage + 1} are used up before it begins: raise their "
            f"max_epochs, or leave stage {stage + 1} out"
        )
    return MixturePlan(tuple(sources), tuple(stretches))


def _shares(sources: Sequence[Source], stage: Stage, counts: Sequence[int]) -> tuple[int, ...]:
    """Return each source's rows per `PERIOD`, 0 if used up; empty if all are."""
    wanted = [Fraction(0)] * len(sources)
    for number, (source, count) in enumerate(zip(sources, counts, strict=True)):
        weight = stage.weights.get(source.name, 0.0)
        if weight and count != source.total_rows:
            wanted[number] = Fraction(weight) / source.tokens_per_row
    total = sum(wanted)
    if not total:
        return ()
    exact = [PERIOD * each / total for each in wanted]
    shares = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for number in by_remainder[: PERIOD - sum(shares)]:
        shares[number] += 1
    for source, share, each in zip(sources, shares, exact, strict=True):
        if each and not share:
            raise ValueError(
                f'weight {stage.weights[source.name]} of "{source.name}" is less than one row in '
                f"{PERIOD}: raise it, or leave the dataset out of this stage"
            )
    return tuple(shares)


def _first_used_up(sources: Sequence[Source], stretch: Stretch) -> int | None:
    """Return the position after the first used-up source's last row."""
    earliest: list[tuple[int, int]] = []
    latest: list[int] = []
    for number, (source, share) in enumerate(zip(sources, stretch.shares, strict=True)):
        if share and source.total_rows is not None:
            left = source.total_rows - stretch.counts[number]
            earliest.append(((left - 1) * PERIOD // share, number))
            latest.append(-(-left * PERIOD // share))
    return min(
        (
            stretch.position_of(number, (sources[number].total_rows or 0) - 1) + 1
            for first, number in earliest
            if first < min(latest)
        ),
        default=None,
    )


def _next_stage(sources: Sequence[Source], stages: Sequence[Stage], stretch: Stretch) -> int | None:
    if stretch.stage + 1 == len(stages):
        return None
    left = stages[stretch.stage + 1].from_tokens - _tokens(sources, stretch.counts)
    per_row = _tokens(sources, stretch.shares) / PERIOD
    return stretch.start + max(0, -int(-left // per_row))


def _tokens(sources: Sequence[Source], counts: Sequence[int]) -> Fraction:
    pairs = zip(sources, counts, strict=True)
    return sum((count * source.tokens_per_row for source, count in pairs), Fraction(0))


@lru_cache(maxsize=8)
def _turns(shares: tuple[int, ...]) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    return interleave(np.array(shares, np.int64))
