"""One row as arrays: where each field lies in the row's buffer, and how segments fill it.

A row is one int32 array, so that a batch is one tensor whatever its fields are. `RowLayout` says
where each field lies; `fill_segment` writes a segment from its sample's bytes without decoding
anything else of the document. `pipeline.streaming` describes the fields.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit
from numpy.typing import NDArray

PADDING_ID = 0
"""Stands where no token does. Every vocabulary has it; masks keep it out of every loss."""

_ONE = int(np.float32(1.0).view(np.int32))

SampleTensors = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]
"""Position in the sample and bytes per value of: student ids, teacher ids, advance, width."""


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row.

    Attributes:
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row.
        max_segments: the most segments in a row.
    """

    seq_length: int
    teacher_seq_length: int
    max_segments: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field, in the order of the buffer."""
        student, teacher = (self.seq_length,), (self.teacher_seq_length,)
        # One more place for where the padding starts, one for where it ends.
        bounds = (self.max_segments + 2,)
        return {
            "input_ids": student,
            "labels": student,
            "loss_mask": student,
            "position_ids": student,
            "teacher_spans": (self.seq_length, 2),
            "teacher_input_ids": teacher,
            "teacher_position_ids": teacher,
            "cu_seqlens": bounds,
            "teacher_cu_seqlens": bounds,
            "num_quarantined_tokens": (),
        }

    @cached_property
    def starts(self) -> dict[str, int]:
        """First word of each field in the buffer."""
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        return dict(zip(self.shapes, np.cumsum([0, *sizes]).tolist(), strict=False))

    @cached_property
    def num_words(self) -> int:
        """int32 words in a row's buffer."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @cached_property
    def kernel_starts(self) -> tuple[int, ...]:
        """First words of the seven per-token fields, as the kernels take them."""
        return tuple(list(self.starts.values())[:7])


@njit(cache=True, nogil=True)
def fill_segment(
    row: NDArray[np.int32],
    starts: tuple[int, ...],
    at: tuple[int, int],
    sample: NDArray[np.uint8],
    tensors: SampleTensors,
    tokens: tuple[int, int, int, int],
    added: tuple[int, int, int, int],
    forced: bool,
) -> tuple[int, int, int]:
    """Write a segment; return the row's next free student and teacher place, and bad spans.

    Args:
        row: int32 [words], the row's buffer.
        starts: `RowLayout.kernel_starts`.
        at: first free student and teacher place in the row.
        sample: uint8, the sample's bytes.
        tensors: where its tensors lie.
        tokens: student start, stop, teacher start, stop: the tokens of the document to write.
        added: ids put before and after the student's and the teacher's tokens, -1 for none.
        forced: whether spans may leave the segment; they are then empty.
    """
    student_start, student_stop, teacher_start, teacher_stop = tokens
    text = _fill_tokens(
        row[starts[0] :], at[0], sample, tensors[0], (student_start, student_stop), added[:2]
    )
    end = text + student_stop - student_start + (added[1] >= 0)
    teacher_text = _fill_tokens(
        row[starts[5] :], at[1], sample, tensors[1], (teacher_start, teacher_stop), added[2:]
    )
    teacher_end = teacher_text + teacher_stop - teacher_start + (added[3] >= 0)
    _fill_positions(row[starts[3] :], at[0], end)
    _fill_positions(row[starts[6] :], at[1], teacher_end)
    _fill_labels(row, starts, at[0], end)
    spans = row[starts[4] : starts[5]]
    spans[2 * at[0] : 2 * end] = 0
    bad = _fill_spans(spans, sample, tensors, tokens, (at[0], text, teacher_text - teacher_start))
    return end, teacher_end, 0 if forced else bad


@njit(cache=True, nogil=True)
def fill_nothing(
    row: NDArray[np.int32],
    starts: tuple[int, ...],
    student: tuple[int, int],
    teacher: tuple[int, int],
) -> None:
    """Write padding to half-open ranges of student and teacher places.

    Its positions count from 0 like a segment's, as attention sees it as one.
    """
    for field in (0, 1):
        row[starts[field] + student[0] : starts[field] + student[1]] = PADDING_ID
    row[starts[2] + student[0] : starts[2] + student[1]] = 0
    row[starts[4] + 2 * student[0] : starts[4] + 2 * student[1]] = 0
    row[starts[5] + teacher[0] : starts[5] + teacher[1]] = PADDING_ID
    _fill_positions(row[starts[3] :], student[0], student[1])
    _fill_positions(row[starts[6] :], teacher[0], teacher[1])


@njit(cache=True, nogil=True)
def _fill_tokens(
    out: NDArray[np.int32],
    at: int,
    sample: NDArray[np.uint8],
    tensor: tuple[int, int],
    tokens: tuple[int, int],
    added: tuple[int, int],
) -> int:
    """Write ids with those added around them; return the place of the text's first token."""
    if added[0] >= 0:
        out[at] = added[0]
        at += 1
    count = tokens[1] - tokens[0]
    _read(out[at : at + count], sample, tensor, tokens[0])
    if added[1] >= 0:
        out[at + count] = added[1]
    return at


@njit(cache=True, nogil=True)
def _read(
    out: NDArray[np.int32], sample: NDArray[np.uint8], tensor: tuple[int, int], first: int
) -> None:
    """Read little-endian unsigned integers of 1, 2 or 4 bytes."""
    start, size = tensor
    values = sample[start + first * size : start + (first + len(out)) * size]
    if size == 1:
        for i in range(len(out)):
            out[i] = values[i]
    elif size == 2:
        for i in range(len(out)):
            out[i] = np.int32(values[2 * i]) | np.int32(values[2 * i + 1]) << 8
    else:
        for i in range(len(out)):
            low = np.int32(values[4 * i]) | np.int32(values[4 * i + 1]) << 8
            high = np.int32(values[4 * i + 2]) | np.int32(values[4 * i + 3]) << 8
            out[i] = low | high << 16


@njit(cache=True, nogil=True)
def _fill_positions(out: NDArray[np.int32], start: int, stop: int) -> None:
    for place in range(start, stop):
        out[place] = place - start


@njit(cache=True, nogil=True)
def _fill_labels(row: NDArray[np.int32], starts: tuple[int, ...], at: int, end: int) -> None:
    """Write labels and loss_mask: each token predicts the next, the last one nothing."""
    input_ids, labels, loss_mask = row[starts[0] :], row[starts[1] :], row[starts[2] :]
    for place in range(at, end - 1):
        labels[place] = input_ids[place + 1]
        loss_mask[place] = _ONE
    if end > at:
        labels[end - 1] = PADDING_ID
        loss_mask[end - 1] = 0


@njit(cache=True, nogil=True)
def _fill_spans(
    spans: NDArray[np.int32],
    sample: NDArray[np.uint8],
    tensors: SampleTensors,
    tokens: tuple[int, int, int, int],
    places: tuple[int, int, int],
) -> int:
    """Write each token's span where the token is predicted; return how many leave the segment.

    `places` holds the segment's first place in the row, its text's first place, and what turns
    the document's teacher token into the row's.
    """
    student_start, student_stop, teacher_start, teacher_stop = tokens
    segment, text, shift = places
    advances = np.empty(student_stop, np.int32)
    widths = np.empty(student_stop - student_start, np.int32)
    _read(advances, sample, tensors[2], 0)
    _read(widths, sample, tensors[3], student_start)
    start = advances[:student_start].sum()
    bad = 0
    for i in range(len(widths)):
        start += advances[student_start + i]
        stop = start + widths[i]
        place = text + i - 1
        if widths[i] == 0 or place < segment:
            continue
        if start < teacher_start or stop > teacher_stop:
            bad += 1
            continue
        spans[2 * place] = start + shift
        spans[2 * place + 1] = stop + shift
    return bad
