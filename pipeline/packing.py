"""Which tokens stand in which row, planned from the index alone.

A *row* is what one training step reads per sample: at most `seq_length` student tokens and at most
`teacher_seq_length` teacher tokens, made of *segments*. A segment is a whole document or, where a
document is longer than a row, a piece of it; pieces meet where student and teacher tokens share a
byte boundary, so that each student token keeps all the teacher tokens it is mapped to.

Rows are filled by best fit, largest segment first, within windows of neighbouring documents: a row
touches few shards, and memory stays small whatever the dataset's size.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from pipeline.packing_kernels import ENDS, FORCED, STARTS, fit_segments, split_documents
from schemas.index import ShardIndex
from schemas.manifest import Manifest, TokenizerRecord

__all__ = [
    "ENDS",
    "FORCED",
    "SEGMENT",
    "STARTS",
    "Convention",
    "PackingRules",
    "RowPlan",
    "plan_rows",
    "split_index",
    "suggest_teacher_seq_length",
]

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

_LENGTH_STEP = 64


@dataclass(frozen=True)
class Convention:
    """The tokens that a model expects around a text; they count towards a row's length.

    Attributes:
        first_token_id: put before a document's first token, None for nothing. With it the first
            token of the text is predicted too; without it that token has no loss.
        continued_token_id: put before a segment that continues a document.
        end_token_id: put after a document's last token.
    """

    first_token_id: int | None = None
    continued_token_id: int | None = None
    end_token_id: int | None = None

    @classmethod
    def of_tokenizer(cls, tokenizer: TokenizerRecord, *, ends: bool) -> "Convention":
        """Return a dataset's convention for one side, see `TokenizerRecord.around_text`.

        Args:
            tokenizer: one side of the manifest.
            ends: whether a document's last token is followed by the end-of-document token: True
                for a student, which learns to stop.

        Example:
            >>> Convention.of_tokenizer(manifest.student, ends=True)
            Convention(first_token_id=1, continued_token_id=1, end_token_id=2)
        """
        own = tokenizer.around_text
        return cls(own.first_token_id, own.continued_token_id, own.end_token_id if ends else None)

    @property
    def added_tokens(self) -> tuple[int, int, int]:
        """How many tokens are added (0 or 1): first, continued, end."""
        ids = (self.first_token_id, self.continued_token_id, self.end_token_id)
        return tuple(int(token is not None) for token in ids)  # type: ignore[return-value]


@dataclass(frozen=True)
class PackingRules:
    """What determines a plan, apart from the dataset.

    Attributes:
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row.
        student: the student's convention.
        teacher: the teacher's convention.
        window_rows: rows' worth of student tokens that are packed together. More rows leave less
            padding and spread a row over more shards.

    Raises:
        ValueError: a length that has no room for text.
    """

    seq_length: int
    teacher_seq_length: int
    student: Convention
    teacher: Convention
    window_rows: int = 1024

    def __post_init__(self) -> None:
        """Check the lengths."""
        for name in ("seq_length", "teacher_seq_length"):
            value = getattr(self, name)
            if not 4 <= value < 1 << 31:
                raise ValueError(f"{name} {value} is not in 4 … 2**31 - 1; 2048 is usual")
        if self.window_rows < 1:
            raise ValueError(f"window_rows {self.window_rows} is below 1; 1024 is usual")

    @classmethod
    def of_dataset(
        cls,
        manifest: Manifest,
        *,
        seq_length: int,
        teacher_seq_length: int | None = None,
        student: Convention | None = None,
        teacher: Convention | None = None,
        window_rows: int = 1024,
    ) -> "PackingRules":
        """Return the rules for a dataset, with its own defaults for what is None.

        Args:
            manifest: the dataset's; it says which tokens stand around a text.
            seq_length: student tokens per row.
            teacher_seq_length: teacher tokens per row, see `suggest_teacher_seq_length`.
            student: the student's convention.
            teacher: the teacher's convention.
            window_rows: see the class.

        Raises:
            ValueError: a length that has no room for text.

        Example:
            >>> PackingRules.of_dataset(manifest, seq_length=2048).teacher_seq_length
            1984
        """
        return cls(
            seq_length=seq_length,
            teacher_seq_length=teacher_seq_length
            or suggest_teacher_seq_length(manifest, seq_length),
            student=student or Convention.of_tokenizer(manifest.student, ends=True),
            teacher=teacher or Convention.of_tokenizer(manifest.teacher, ends=False),
            window_rows=window_rows,
        )

    @property
    def student_room(self) -> tuple[int, int, int, int]:
        """Student tokens per row, and tokens added first, continued and at the end."""
        return (self.seq_length, *self.student.added_tokens)

    @property
    def teacher_room(self) -> tuple[int, int, int, int]:
        """The same for the teacher."""
        return (self.teacher_seq_length, *self.teacher.added_tokens)

    @property
    def fingerprint(self) -> str:
        """64 hex digits; equal rules have equal fingerprints."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class RowPlan:
    """R rows of G segments over N documents in W windows.

    Attributes:
        rules: what it was planned by.
        segments: SEGMENT [G], in row order; `document` counts through all shards.
        row_starts: int64 [R + 1]; row r owns segments row_starts[r]:row_starts[r + 1].
        window_row_starts: int64 [W + 1]; window w owns these rows.
        window_shards: int64 [W], the first shard that window w reads.
        shard_document_starts: int64 [shards + 1]; shard i owns these documents.
    """

    rules: PackingRules
    segments: NDArray[np.void]
    row_starts: NDArray[np.int64]
    window_row_starts: NDArray[np.int64]
    window_shards: NDArray[np.int64]
    shard_document_starts: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.row_starts) - 1

    @property
    def num_forced_segments(self) -> int:
        """Segments cut where no byte boundary was shared, see `plan_rows`."""
        return int(np.count_nonzero(self.segments["flags"] & FORCED))

    @property
    def max_segments(self) -> int:
        """The most segments in one row."""
        return int(np.diff(self.row_starts).max(initial=0))

    def row_lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return student and teacher tokens of each row, int64 [R] each, added tokens included."""
        student, teacher = segment_lengths(self.segments, self.rules)
        return _sums(student, self.row_starts), _sums(teacher, self.row_starts)

    def padding(self) -> tuple[float, float]:
        """Return the fractions of the rows' student and teacher tokens that are padding."""
        student, teacher = self.row_lengths()
        rows = max(1, len(self))
        return (
            1 - float(student.sum()) / (rows * self.rules.seq_length),
            1 - float(teacher.sum()) / (rows * self.rules.teacher_seq_length),
        )

    def steps_per_epoch(self, global_batch_size: int) -> tuple[int, int]:
        """Return an epoch's steps and the rows dropped at its end.

        The steps do not depend on how many replicas share a global batch.

        Example:
            >>> plan.steps_per_epoch(48)
            (110, 45)
        """
        return divmod(len(self), global_batch_size)


def plan_rows(indices: Iterable[ShardIndex], rules: PackingRules) -> RowPlan:
    """Return the rows of a dataset: every token of every document once.

    A document that is longer than a row, in student or teacher tokens, is split at the last cut
    point that fits, at most `schemas.index.CUT_STRIDE` tokens before the row is full plus any run
    without a shared boundary. A run without a shared boundary that is itself longer than a row
    (16-byte runs of one character, out of step) is divided in proportion; its segments are marked
    FORCED, and a student token whose teacher tokens fall into another segment is unmapped there.

    Args:
        indices: the shards' indices in the manifest's order; each is dropped when it is planned.
        rules: lengths and conventions.

    Example:
        >>> plan = plan_rows([decode_index(path, with_names=False) for path in paths], rules)
    """
    counts: list[int] = []
    rows: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    parts: list[NDArray[np.void]] = []
    window_rows = [0]
    window_documents: list[int] = []
    for window in _windows(_split(indices, rules, counts), rules):
        order, starts = _pack_window(window, rules)
        window_documents.append(int(window["document"][0]))
        parts.append(window[order])
        rows.append(starts[1:] + rows[-1][-1])
        window_rows.append(window_rows[-1] + len(starts) - 1)
    shard_document_starts = np.cumsum([0, *counts], dtype=np.int64)
    return RowPlan(
        rules=rules,
        segments=np.concatenate([np.empty(0, SEGMENT), *parts]),
        row_starts=np.concatenate(rows),
        window_row_starts=np.array(window_rows, np.int64),
        window_shards=np.searchsorted(shard_document_starts, window_documents, "right") - 1,
        shard_document_starts=shard_document_starts,
    )


def split_index(
    index: ShardIndex, *, student_room: Sequence[int], teacher_room: Sequence[int]
) -> NDArray[np.void]:
    """Return a shard's segments in document order, SEGMENT [G]; documents count from 0.

    Args:
        index: the shard's.
        student_room: as in `PackingRules.student_room`.
        teacher_room: as in `PackingRules.teacher_room`.
    """
    table = split_documents(
        index.num_student_tokens,
        index.num_teacher_tokens,
        index.cut_starts,
        index.cut_student,
        index.cut_teacher,
        np.array(student_room, np.int64),
        np.array(teacher_room, np.int64),
    )
    return np.ascontiguousarray(table, "<u4").view(SEGMENT).reshape(-1)


def segment_lengths(
    segments: NDArray[np.void], rules: PackingRules
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return student and teacher tokens of each segment, int64 [G] each, added ones included."""
    return (
        _lengths(segments, "student", rules.student),
        _lengths(segments, "teacher", rules.teacher),
    )


def suggest_teacher_seq_length(manifest: Manifest, seq_length: int) -> int:
    """Return a teacher length with which rows are filled by the student's tokens.

    It is the dataset's mean ratio of teacher to student tokens with 12.5 % to spare, rounded up
    to a multiple of 64. Too long costs teacher padding, too short costs student padding.

    Example:
        >>> suggest_teacher_seq_length(manifest, 2048)
        1984
    """
    totals = manifest.totals
    ratio = totals["num_teacher_tokens"] / max(1, totals["num_student_tokens"])
    return max(1, -int(-seq_length * ratio * 1.125 // _LENGTH_STEP)) * _LENGTH_STEP


def _split(
    indices: Iterable[ShardIndex], rules: PackingRules, counts: list[int]
) -> Iterator[NDArray[np.void]]:
    """Yield each shard's segments in document order; note each shard's documents in `counts`."""
    first_document = 0
    for index in indices:
        segments = split_index(
            index, student_room=rules.student_room, teacher_room=rules.teacher_room
        )
        counts.append(len(index))
        first_document += len(index)
        if first_document >= 1 << 32:
            raise ValueError(f"{first_document} documents exceed 2**32: split the dataset")
        segments["document"] += np.uint32(first_document - len(index))
        yield segments


def _windows(shards: Iterable[NDArray[np.void]], rules: PackingRules) -> Iterator[NDArray[np.void]]:
    """Yield runs of segments with about `window_rows` rows' worth of tokens."""
    pending = np.empty(0, SEGMENT)
    for segments in shards:
        pending = np.concatenate([pending, segments])
        student, teacher = segment_lengths(pending, rules)
        fill = np.maximum(student / rules.seq_length, teacher / rules.teacher_seq_length)
        window = (np.cumsum(fill) // rules.window_rows).astype(np.int64)
        stops = np.searchsorted(window, np.arange(1, window.max(initial=0) + 1))
        start = 0
        for stop in stops:
            if stop > start:
                yield pending[start:stop]
                start = int(stop)
        pending = pending[start:]
    if len(pending):
        yield pending


def _pack_window(
    window: NDArray[np.void], rules: PackingRules
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the window's segments in row order, and where each of its rows starts."""
    student, teacher = segment_lengths(window, rules)
    fill = np.maximum(student / rules.seq_length, teacher / rules.teacher_seq_length)
    decreasing = np.argsort(-fill, kind="stable")
    row = fit_segments(
        student[decreasing], teacher[decreasing], rules.seq_length, rules.teacher_seq_length
    )
    order = np.argsort(row, kind="stable")
    starts = np.searchsorted(row[order], np.arange(int(row.max()) + 2))
    return decreasing[order], starts


def _lengths(segments: NDArray[np.void], side: str, convention: Convention) -> NDArray[np.int64]:
    first, continued, end = convention.added_tokens
    flags = segments["flags"]
    lengths: NDArray[np.int64] = segments[f"{side}_stop"].astype(np.int64)
    lengths -= segments[f"{side}_start"]
    lengths += np.where(flags & STARTS, first, continued)
    lengths += np.where(flags & ENDS, end, 0)
    return lengths


def _sums(values: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    totals = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=totals[1:])
    return np.diff(totals[starts])
