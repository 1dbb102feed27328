"""Plan the rows of a dataset from its index alone.

A *row* is one training sample: at most `seq_length` student and `teacher_seq_length` teacher tokens
in *segments*. A segment is a document, or a piece of one longer than a row; pieces meet where both
sides' tokens share a byte boundary. Rows are filled within windows of neighbouring documents, so
each touches few shards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.packing.kernels import (
    FORCED,
    find_unsound,
    fit_segments,
    measure_segments,
    split_documents,
)
from pipeline.packing.rules import PackingRules
from schemas.index import ShardIndex

SEGMENT = np.dtype(
    [
        ("document", "<u4"),
        ("student_start", "<u4"),
        ("student_stop", "<u4"),
        ("teacher_start", "<u4"),
        ("teacher_stop", "<u4"),
        ("flags", "<u4"),
    ]
)
"""A piece of a document: half-open token ranges, and STARTS | ENDS | FORCED."""

_PLAIN = np.dtype((np.void, SEGMENT.itemsize))
"""A segment's bytes, which numpy moves a hundred times as fast as named fields."""

_NO_CUTS = np.empty(0, np.uint32)

SplitShard = tuple[NDArray[np.void], int]
"""A shard's segments in document order, SEGMENT [G], and its number of documents."""

Splitter = Callable[[ShardIndex, NDArray[np.bool_] | None], SplitShard]


@dataclass(frozen=True, eq=False)
class RowPlan:
    """R rows of G segments over N documents in W windows.

    Attributes:
        segments: SEGMENT [G], in row order; `document` counts through all shards.
        row_starts: [R + 1]; row r owns segments row_starts[r]:row_starts[r + 1].
        window_row_starts: [W + 1], each window's rows.
        window_shards: [W], each window's first shard.
        shard_document_starts: [shards + 1], each shard's documents.
    """

    rules: PackingRules
    segments: NDArray[np.void]
    row_starts: NDArray[np.int64]
    window_row_starts: NDArray[np.int64]
    window_shards: NDArray[np.int64]
    shard_document_starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @property
    def num_forced_segments(self) -> int:
        """Segments cut without a shared byte boundary."""
        return int(np.count_nonzero(self.segments["flags"] & FORCED))

    @property
    def max_segments(self) -> int:
        """The most segments in one row."""
        return int(np.diff(self.row_starts).max(initial=0))

    @property
    def num_text_tokens(self) -> tuple[int, int]:
        """Student and teacher tokens of all rows, without added ones."""
        student, teacher = (
            self.segments[f"{side}_stop"].sum(dtype=np.int64)
            - self.segments[f"{side}_start"].sum(dtype=np.int64)
            for side in ("student", "teacher")
        )
        return int(student), int(teacher)

    def row_lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each row's student and teacher tokens, [R], added ones included."""
        own = _measure(self.segments, self.rules)
        return _sums(own.student, self.row_starts), _sums(own.teacher, self.row_starts)

    def padding(self) -> tuple[float, float]:
        """Return the shares of padding on both sides."""
        student, teacher = self.row_lengths()
        rows = max(1, len(self))
        return (
            1 - float(student.sum()) / (rows * self.rules.seq_length),
            1 - float(teacher.sum()) / (rows * self.rules.teacher_seq_length),
        )


def plan_rows(each: Callable[[Splitter], Iterable[SplitShard]], rules: PackingRules) -> RowPlan:
    """Plan the rows of a dataset's documents, every token once, by best fit within windows.

    A document longer than a row, on either side, is split at the last cut point that fits; a chat
    at the last turn that fits, if any. A run without a shared boundary that is longer than a row is
    divided in proportion, in segments marked FORCED; a student token is unmapped if its teacher
    tokens are in another segment.

    `each` applies a function to every shard's index and documents to plan, [N]. ValueError from
    2**32 documents on.
    """
    counts: list[int] = []
    windows: list[tuple[NDArray[np.void], NDArray[np.int64]]] = []
    first_documents: list[int] = []
    pending = np.empty(0, SEGMENT)

    def pack(window: _Measured) -> None:
        windows.append(_pack_window(window, rules))
        first_documents.append(int(window.segments["document"][0]))

    first_document = 0
    for segments, num_documents in each(partial(_split, rules)):
        if first_document + num_documents >= 1 << 32:
            raise ValueError(
                f"{first_document + num_documents} documents exceed 2**32: split the dataset"
            )
        segments["document"] += np.uint32(first_document)
        first_document += num_documents
        counts.append(num_documents)
        full, pending = _cut_windows(_measure(_join([pending, segments]), rules), rules)
        for window in full:
            pack(window)
    if len(pending):
        pack(_measure(pending, rules))
    row_sizes = [sizes for _, sizes in windows]
    shard_document_starts = np.cumsum([0, *counts], dtype=np.int64)
    return RowPlan(
        rules=rules,
        segments=_join([segments for segments, _ in windows]),
        row_starts=np.cumsum(np.concatenate([np.zeros(1, np.int64), *row_sizes])),
        window_row_starts=np.cumsum([0, *map(len, row_sizes)], dtype=np.int64),
        window_shards=np.searchsorted(shard_document_starts, first_documents, "right") - 1,
        shard_document_starts=shard_document_starts,
    )


def require_sound(
    plan: RowPlan, num_student: NDArray[np.uint32], num_teacher: NDArray[np.uint32]
) -> None:
    """Check a foreign plan for all that loops over rows rely on; else ValueError."""
    last_shard = len(plan.shard_document_starts) - 2
    windows = np.concatenate([[0], plan.window_shards, [last_shard]])
    bounds = ((plan.row_starts, len(plan.segments)), (plan.window_row_starts, len(plan)))
    divided = all(len(b) > 1 and (b[0], b[-1]) == (0, size) and _rises(b) for b, size in bounds)
    if not divided or len(windows) != len(plan.window_row_starts) + 1 or not _rises(windows):
        raise ValueError("rows and windows don't divide its segments")
    counts = _read_only(num_student), _read_only(num_teacher)
    row_starts = _read_only(plan.row_starts, np.int64)
    row = find_unsound(_table(plan.segments), row_starts, *counts, *_rooms(plan.rules))
    if row >= 0:
        raise ValueError(f"row {row} has a segment beyond its document, or too many tokens")


def split_index(
    index: ShardIndex, *, student_room: Sequence[int], teacher_room: Sequence[int]
) -> NDArray[np.void]:
    """Split a shard's documents into segments, SEGMENT [G]; rooms as in `PackingRules`."""
    table = split_documents(
        num_student=index.num_student_tokens,
        num_teacher=index.num_teacher_tokens,
        cut_starts=index.cut_starts,
        cut_student=_read_only(index.cut_student),
        cut_teacher=_read_only(index.cut_teacher),
        at_turn=_read_only(index.chats.get("cut_at_turn", _NO_CUTS)),
        student_room=np.array(student_room, np.int64),
        teacher_room=np.array(teacher_room, np.int64),
    )
    return np.ascontiguousarray(table, "<u4").view(SEGMENT).reshape(-1)


class _Measured(NamedTuple):
    segments: NDArray[np.void]
    student: NDArray[np.int64]
    teacher: NDArray[np.int64]
    fill: NDArray[np.float64]


def _split(rules: PackingRules, index: ShardIndex, kept: NDArray[np.bool_] | None) -> SplitShard:
    segments = split_index(index, student_room=rules.student_room, teacher_room=rules.teacher_room)
    return segments if kept is None else segments[kept[segments["document"]]], len(index)


def _measure(segments: NDArray[np.void], rules: PackingRules) -> _Measured:
    student, teacher, fill = measure_segments(_table(segments), *_rooms(rules))
    if rules.one_document_a_row:
        fill = np.ones_like(fill)
    return _Measured(segments, student, teacher, fill)


def _rises(values: NDArray[np.int64]) -> bool:
    return bool((np.diff(values) >= 0).all())


def _table(segments: NDArray[np.void]) -> NDArray[np.uint32]:
    return _read_only(np.ascontiguousarray(segments).view(np.uint32).reshape(-1, 6))


def _rooms(rules: PackingRules) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array(rules.student_room, np.int64), np.array(rules.teacher_room, np.int64)


def _cut_windows(
    measured: _Measured, rules: PackingRules
) -> tuple[list[_Measured], NDArray[np.void]]:
    """Return windows of about `window_rows` rows, and the rest."""
    segments, student, teacher, fill = measured
    window = (np.cumsum(fill) // rules.window_rows).astype(np.int64)
    stops = np.searchsorted(window, np.arange(1, window.max(initial=0) + 1))
    bounds = np.unique(np.concatenate([[0], stops])).tolist()
    parts = [slice(*ends) for ends in pairwise(bounds)]
    windows = [_Measured(segments[p], student[p], teacher[p], fill[p]) for p in parts]
    return windows, segments[bounds[-1] :]


def _pack_window(
    window: _Measured, rules: PackingRules
) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Return segments in row order, and each row's number of them."""
    if rules.one_document_a_row:
        return window.segments, np.ones(len(window.segments), np.int64)
    decreasing = np.argsort(-window.fill, kind="stable")
    row = fit_segments(
        window.student[decreasing],
        window.teacher[decreasing],
        rules.seq_length,
        rules.teacher_seq_length,
    )
    order = decreasing[np.argsort(row, kind="stable")]
    segments = window.segments.view(_PLAIN)[order].view(SEGMENT)
    return segments, np.bincount(row)


def _join(parts: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    joined = np.concatenate([np.empty(0, _PLAIN), *(part.view(_PLAIN) for part in parts)])
    segments: NDArray[np.void] = joined.view(SEGMENT)
    return segments


def _read_only(values: NDArray[np.integer], dtype: Any = np.uint32) -> NDArray[Any]:
    """Convert to the one type that kernels are compiled for."""
    numbers = np.asarray(values, dtype).view()
    numbers.flags.writeable = False
    return numbers


def _sums(values: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    totals = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=totals[1:])
    return np.diff(totals[starts])
