"""Quality of an alignment (paper, section 2; Fig. 1, 3, 6).

IoU and IoS compare a student token's bytes with its teacher tokens'. IoS is 1 whenever these tile
the text, so IoU is always shown next to it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch, Ranges, TokenBatch
from pipeline.compiled import compiled

LENGTH_EDGES: tuple[int, ...] = tuple(
    sorted({0, 1, *(round(2 ** (quarter / 2)) for quarter in range(2, 50))})
)
"""Lower edges of the bins of document lengths in tokens: two per octave, the last one open."""

MAX_BIN = 32
"""Widths and token sizes from here on share one bin."""

IOU_SCALE = "1 is best; most pairs have 0.78 to 0.99, a student of bytes 0.25"
"""Scale of a mean IoU in bytes; docs/concepts/alignment.md has the pairs."""

OVER_WIDE = ("num_student_over_wide", "num_teacher_over_wide")


@dataclass(frozen=True, eq=False)
class AlignmentStatistics:
    """Counts over aligned documents; they add up over datasets.

    Sums of IoU and IoS are over mapped tokens, in bytes. Arrays count documents by tokens,
    [len(LENGTH_EDGES)], student tokens by their teacher tokens, and either side's tokens by bytes,
    [MAX_BIN + 1].

    Over-wide tokens share bytes with a neighbour, which a normaliser reordered or divided. JSON
    leaves their numbers out if 0.
    """

    num_documents: int
    num_text_bytes: int
    num_student_tokens: int
    num_teacher_tokens: int
    num_mapped: int
    byte_iou_sum: float
    byte_ios_sum: float
    student_length_counts: NDArray[np.int64]
    teacher_length_counts: NDArray[np.int64]
    span_width_counts: NDArray[np.int64]
    student_token_bytes_counts: NDArray[np.int64]
    teacher_token_bytes_counts: NDArray[np.int64]
    num_student_over_wide: int = 0
    num_teacher_over_wide: int = 0

    @property
    def byte_iou(self) -> float:
        """Mean IoU of mapped tokens, in bytes."""
        return self.byte_iou_sum / max(self.num_mapped, 1)

    @property
    def byte_ios(self) -> float:
        """Mean IoS of mapped tokens, in bytes."""
        return self.byte_ios_sum / max(self.num_mapped, 1)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and lists."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in values.items()
            if name not in OVER_WIDE or value
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "AlignmentStatistics":
        """Reverse `to_json`."""
        arrays: dict[str, Any] = {
            name: np.array(value, np.int64) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return AlignmentStatistics(**arrays)

    @staticmethod
    def merge(parts: Iterable["AlignmentStatistics"]) -> "AlignmentStatistics":
        """Add up statistics; the order matters only for float rounding."""
        total = AlignmentStatistics.empty()
        for part in parts:
            sums = {e.name: getattr(total, e.name) + getattr(part, e.name) for e in fields(part)}
            total = AlignmentStatistics(**sums)
        return total

    @staticmethod
    def empty() -> "AlignmentStatistics":
        """Return the statistics of no documents."""
        by_length, by_bin = (np.zeros(size, np.int64) for size in (len(LENGTH_EDGES), MAX_BIN + 1))
        counts = (by_length, by_length.copy(), by_bin, by_bin.copy(), by_bin.copy())
        return AlignmentStatistics(0, 0, 0, 0, 0, 0.0, 0.0, *counts)


@dataclass(frozen=True, eq=False)
class DocumentQuality:
    """Mapped student tokens, and the sum of their IoU in bytes, by document."""

    num_mapped: NDArray[np.int64]
    byte_iou_sum: NDArray[np.float64]


def measure_documents(batch: AlignedBatch) -> tuple[AlignmentStatistics, DocumentQuality]:
    """Return a batch's statistics, and those of each document for the index."""
    student, teacher = batch.student, batch.teacher
    bins = [np.zeros(MAX_BIN + 1, np.int64) for _ in range(3)]
    num_documents = student.num_documents
    quality = DocumentQuality(np.zeros(num_documents, np.int64), np.zeros(num_documents))
    num_mapped, iou_sum, ios_sum = _measure_spans(
        student_offsets=student.byte_offsets,
        student_cu=student.cu_tokens,
        teacher_offsets=teacher.byte_offsets,
        teacher_cu=teacher.cu_tokens,
        teacher_spans=batch.teacher_spans,
        width_counts=bins[0],
        student_bytes_counts=bins[1],
        teacher_bytes_counts=bins[2],
        document_mapped=quality.num_mapped,
        document_iou_sum=quality.byte_iou_sum,
    )
    statistics = AlignmentStatistics(
        num_documents=len(batch.documents),
        num_text_bytes=sum(len(document.text) for document in batch.documents),
        num_student_tokens=len(student.input_ids),
        num_teacher_tokens=len(teacher.input_ids),
        num_mapped=int(num_mapped),
        byte_iou_sum=float(iou_sum),
        byte_ios_sum=float(ios_sum),
        student_length_counts=count_lengths(np.diff(student.cu_tokens)),
        teacher_length_counts=count_lengths(np.diff(teacher.cu_tokens)),
        span_width_counts=bins[0],
        student_token_bytes_counts=bins[1],
        teacher_token_bytes_counts=bins[2],
        num_student_over_wide=_count_over_wide(student),
        num_teacher_over_wide=_count_over_wide(teacher),
    )
    return statistics, quality


def count_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count documents, of int [D] tokens, in each bin of `LENGTH_EDGES`.

    Example:
        >>> count_lengths(np.array([0, 1, 1]))[:3].tolist()
        [1, 2, 0]
    """
    bins = np.searchsorted(LENGTH_EDGES, lengths, side="right") - 1
    return np.bincount(bins, minlength=len(LENGTH_EDGES)).astype(np.int64)


def overlap_ratios(
    student_ranges: NDArray[np.int64], teacher_ranges: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return IoU and IoS, float64 [T], of half-open ranges, int64 [T, 2]; NaN if empty."""
    intersection = np.minimum(student_ranges[:, 1], teacher_ranges[:, 1]) - np.maximum(
        student_ranges[:, 0], teacher_ranges[:, 0]
    )
    student_sizes = student_ranges[:, 1] - student_ranges[:, 0]
    teacher_sizes = teacher_ranges[:, 1] - teacher_ranges[:, 0]
    valid = (student_sizes > 0) & (teacher_sizes > 0)
    shared = np.where(valid, np.maximum(intersection, 0), np.nan)
    union = np.where(valid, student_sizes + teacher_sizes - shared, 1)
    return shared / union, shared / np.where(valid, student_sizes, 1)


def _count_over_wide(tokens: TokenBatch) -> int:
    if tokens.tiles.all():
        return 0
    starts, ends = tokens.byte_offsets.T
    shares_next = np.append((starts[1:] < ends[:-1]) & (starts[:-1] < ends[:-1]), False)
    last_tokens = tokens.cu_tokens[1:][np.diff(tokens.cu_tokens) > 0] - 1
    shares_next[last_tokens] = False
    return int(np.count_nonzero(shares_next | np.roll(shares_next, 1)))


@compiled
def _measure_spans(
    student_offsets: Ranges,
    student_cu: NDArray[np.int64],
    teacher_offsets: Ranges,
    teacher_cu: NDArray[np.int64],
    teacher_spans: Ranges,
    width_counts: NDArray[np.int64],
    student_bytes_counts: NDArray[np.int64],
    teacher_bytes_counts: NDArray[np.int64],
    document_mapped: NDArray[np.int64],
    document_iou_sum: NDArray[np.float64],
) -> tuple[int, float, float]:
    num_mapped = num_single = 0
    iou_sum = ios_sum = 0.0
    for d in range(len(student_cu) - 1):
        student = student_offsets[student_cu[d] : student_cu[d + 1]]
        teacher = teacher_offsets[teacher_cu[d] : teacher_cu[d + 1]]
        spans = teacher_spans[student_cu[d] : student_cu[d + 1]]
        own_iou, mapped_before = 0.0, num_mapped
        for i in range(len(student)):
            a, b = student[i, 0], student[i, 1]
            first, end = np.uintp(spans[i, 0]), np.uintp(spans[i, 1])
            student_bytes_counts[min(b - a, MAX_BIN)] += 1
            if end - first == 1:  # nearly all: a counter in a register is not waited for
                num_single += 1
            else:
                width_counts[min(end - first, np.uintp(MAX_BIN))] += 1
                if end == first:
                    continue
            c, e = teacher[first, 0], teacher[end - np.uintp(1), 1]
            shared = min(b, e) - max(a, c)
            num_mapped += 1
            iou = shared / (max(b, e) - min(a, c))
            iou_sum += iou
            own_iou += iou
            ios_sum += 1.0 if shared == b - a else shared / (b - a)
        document_mapped[d] = num_mapped - mapped_before
        document_iou_sum[d] = own_iou
    width_counts[1] += num_single
    for j in range(len(teacher_offsets)):
        size = teacher_offsets[j, 1] - teacher_offsets[j, 0]
        teacher_bytes_counts[min(size, MAX_BIN)] += 1
    return num_mapped, iou_sum, ios_sum
