"""The order of a run's rows, and each replica's part: pure arithmetic.

Groups of shards are shuffled, then the rows inside each, so a run reads one group's shards at a
time. Any position is found without the rest of the epoch.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from pipeline.packing.plan import RowPlan
from pipeline.recent import Recent

MAX_GROUP_ROWS = 1 << 18
"""Rows shuffled together: finding a position takes as long as sorting them."""

_KEPT_RESULTS = 4


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The shuffled order of a plan's rows, determined by `name` and `seed`.

    Group g owns rows `group_row_starts[g]` to `[g + 1]`.
    """

    name: str
    seed: int
    group_row_starts: NDArray[np.int64]
    group_shards: tuple[range, ...]
    # Each order keeps its own last results, because a mixture reads many in turns.
    _recent_groups: Recent[int, tuple[list[int], list[int]]] = field(
        default_factory=lambda: Recent(_KEPT_RESULTS), repr=False
    )
    _recent_rows: Recent[tuple[int, int], NDArray[np.int64]] = field(
        default_factory=lambda: Recent(_KEPT_RESULTS), repr=False
    )

    def row_index(self, epoch: int, epoch_position: int) -> int:
        """Return the plan's row at a position of an epoch."""
        _, group, start = self.locate(epoch, epoch_position)
        rows = self._recent_rows.get((epoch, group), lambda: self._rows_of(epoch, group))
        return int(rows[epoch_position - start])

    def locate(self, epoch: int, epoch_position: int) -> tuple[int, int, int]:
        """Return a position's place among the groups, its group, and the group's start."""
        groups, starts = self._groups(epoch)
        place = bisect_right(starts, epoch_position) - 1
        return place, groups[place], starts[place]

    def group_at(self, epoch: int, place: int) -> int | None:
        """Return the group at a place of the epoch; None past its end."""
        groups, _ = self._groups(epoch)
        return groups[place] if place < len(groups) else None

    def _groups(self, epoch: int) -> tuple[list[int], list[int]]:
        return self._recent_groups.get(epoch, lambda: self._groups_of(epoch))

    def _groups_of(self, epoch: int) -> tuple[list[int], list[int]]:
        sizes = np.diff(self.group_row_starts)
        groups = _shuffled(f"{self.name} {self.seed} {epoch} groups", len(sizes))
        starts = np.cumsum(sizes[groups]) - sizes[groups]
        return groups.tolist(), starts.tolist()

    def _rows_of(self, epoch: int, group: int) -> NDArray[np.int64]:
        first, stop = self.group_row_starts[group : group + 2].tolist()
        rows = _shuffled(f"{self.name} {self.seed} {epoch} {group}", stop - first)
        rows += first
        return rows


def order_rows(plan: RowPlan, name: str, *, seed: int, shuffle_shards: int) -> RowOrder:
    """Order a plan's rows in groups of `shuffle_shards` shards, at most `MAX_GROUP_ROWS` rows.

    Larger groups mix rows better, but need more shards at hand.
    """
    if shuffle_shards < 1:
        raise ValueError(f"shuffle_shards {shuffle_shards} is below 1; 8 is usual")
    rows = plan.window_row_starts[:-1]
    first_windows = _first_of_runs(plan.window_shards // shuffle_shards)
    rows_before = rows - np.repeat(
        rows[first_windows], np.diff(np.append(first_windows, len(rows)))
    )
    part = rows_before // MAX_GROUP_ROWS
    first_windows = np.union1d(first_windows, _first_of_runs(part))
    starts = np.append(plan.window_row_starts[:-1][first_windows], len(plan))
    first_shards = plan.window_shards[first_windows].tolist()
    last_shards = [*first_shards[1:], len(plan.shard_document_starts) - 2]
    shards = tuple(range(a, b + 1) for a, b in zip(first_shards, last_shards, strict=True))
    return RowOrder(name, seed, starts, shards)


@dataclass(frozen=True)
class ReplicaBatches:
    """One replica's micro-batches, cut as Megatron's sampler does; a DataLoader's `batch_sampler`.

    A global batch is the next `global_batch_size` samples, whatever the number of replicas.
    Micro-batch m of replica r begins at its sample `(m * num_replicas + r) * micro_batch_size`.
    ValueError if sizes don't divide each other.
    """

    num_samples: int
    consumed_samples: int
    micro_batch_size: int
    global_batch_size: int
    replica: int = 0
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.num_replicas:
            raise ValueError(f"replica {self.replica} is not in 0 … {self.num_replicas - 1}")
        share = self.micro_batch_size * self.num_replicas
        if share < 1 or self.global_batch_size % share:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} isn't a multiple of micro_batch_size "
                f"{self.micro_batch_size} by {self.num_replicas} replicas; change one of them"
            )
        for name in ("num_samples", "consumed_samples"):
            value = getattr(self, name)
            if value < 0 or value % self.global_batch_size:
                raise ValueError(
                    f"{name} {value} isn't a multiple of global_batch_size "
                    f"{self.global_batch_size}: a step would be cut; use the batch size that the "
                    "run was started with"
                )

    def __len__(self) -> int:
        left = max(0, self.num_samples - self.consumed_samples)
        return left // (self.micro_batch_size * self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        share = self.micro_batch_size * self.num_replicas
        first = self.consumed_samples + self.replica * self.micro_batch_size
        for start in range(first, first + len(self) * share, share):
            yield list(range(start, start + self.micro_batch_size))


def _shuffled(key: str, size: int) -> NDArray[np.int64]:
    """Return 0 … size - 1 in an order that only `key` determines.

    Numpy guarantees Philox words, but not `Generator.permutation`.
    """
    digest = sha256(key.encode()).digest()
    words = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(size)
    return np.argsort(words, kind="stable")


def _first_of_runs(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.diff(values, prepend=-1))
