"""Loops that write samples' tokens into the fields of a row."""

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled

PADDING_ID = 0  # every vocabulary has it; masks keep it out of every loss

INPUT_IDS, LABELS, LOSS_MASK, POSITION_IDS, TEACHER_SPANS = range(5)
TEACHER_INPUT_IDS, TEACHER_POSITION_IDS, CU_SEQLENS, TEACHER_CU_SEQLENS = range(5, 9)
NUM_QUARANTINED = 9
"""Places of the fields in `RowLayout.kernel_starts`."""

STUDENT, TEACHER, SEGMENT = range(3)
"""Places in `at`: the next student place, the next teacher place, the number of segments."""

STUDENT_IDS, TEACHER_IDS, ADVANCE, WIDTH = range(4)
"""Places in `SampleTensors`."""

SampleTensors = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]
"""Position in the sample and bytes per value of: student ids, teacher ids, advance, width."""

_ONE = int(np.float32(1.0).view(np.int32))


@compiled
def fill_segment(
    row: NDArray[np.int32],
    starts: tuple[int, ...],
    at: tuple[int, int, int],
    sample: NDArray[np.uint8],
    tensors: SampleTensors,
    tokens: tuple[int, int, int, int],
    added: tuple[int, int, int, int],
    vocab_sizes: tuple[int, int],
    forced: bool,
) -> tuple[int, int]:
    """Write a segment; return how many spans wrongly leave it, and how many ids are unknown.

    `tokens` are its bounds in the document, student's then teacher's; `added` the ids before and
    after, -1 for none. If `forced`, spans that leave it become empty.
    """
    student_start, student_stop, teacher_start, teacher_stop = tokens
    text = _fill_tokens(
        row[starts[INPUT_IDS] :],
        at[STUDENT],
        sample,
        tensors[STUDENT_IDS],
        (student_start, student_stop),
        added[:2],
    )
    end = text + student_stop - student_start + (added[1] >= 0)
    teacher_text = _fill_tokens(
        row[starts[TEACHER_INPUT_IDS] :],
        at[TEACHER],
        sample,
        tensors[TEACHER_IDS],
        (teacher_start, teacher_stop),
        added[2:],
    )
    teacher_end = teacher_text + teacher_stop - teacher_start + (added[3] >= 0)
    ids = row[starts[INPUT_IDS] + text : starts[INPUT_IDS] + end]
    teacher_ids = row[starts[TEACHER_INPUT_IDS] + teacher_text :][: teacher_end - teacher_text]
    unknown = _count_unknown(ids, vocab_sizes[0]) + _count_unknown(teacher_ids, vocab_sizes[1])
    _fill_positions(row[starts[POSITION_IDS] :], at[STUDENT], end)
    _fill_positions(row[starts[TEACHER_POSITION_IDS] :], at[TEACHER], teacher_end)
    _fill_labels(row, starts, at[STUDENT], end)
    spans = row[starts[TEACHER_SPANS] : starts[TEACHER_INPUT_IDS]]
    # Without a context token nothing predicts the segment's first token: its span has no place.
    predicted = min(student_stop, student_start + (1 if text == at[STUDENT] else 0))
    spans[2 * at[STUDENT] + 2 * (student_stop - predicted) : 2 * end] = 0
    bad = _fill_spans(
        spans[2 * at[STUDENT] :],
        sample,
        tensors,
        (predicted, student_stop, teacher_start, teacher_stop),
        teacher_text - teacher_start,
    )
    row[starts[CU_SEQLENS] + at[SEGMENT] + 1] = end
    row[starts[TEACHER_CU_SEQLENS] + at[SEGMENT] + 1] = teacher_end
    return 0 if forced else bad, unknown


@compiled
def fill_nothing(
    row: NDArray[np.int32], starts: tuple[int, ...], at: tuple[int, int, int], stop: tuple[int, int]
) -> None:
    """Write a segment without tokens; its positions count like any segment's."""
    for field in (INPUT_IDS, LABELS):
        row[starts[field] + at[STUDENT] : starts[field] + stop[STUDENT]] = PADDING_ID
    row[starts[LOSS_MASK] + at[STUDENT] : starts[LOSS_MASK] + stop[STUDENT]] = 0
    row[starts[TEACHER_SPANS] + 2 * at[STUDENT] : starts[TEACHER_SPANS] + 2 * stop[STUDENT]] = 0
    row[starts[TEACHER_INPUT_IDS] + at[TEACHER] : starts[TEACHER_INPUT_IDS] + stop[TEACHER]] = (
        PADDING_ID
    )
    _fill_positions(row[starts[POSITION_IDS] :], at[STUDENT], stop[STUDENT])
    _fill_positions(row[starts[TEACHER_POSITION_IDS] :], at[TEACHER], stop[TEACHER])
    row[starts[CU_SEQLENS] + at[SEGMENT] + 1] = stop[STUDENT]
    row[starts[TEACHER_CU_SEQLENS] + at[SEGMENT] + 1] = stop[TEACHER]


@compiled
def finish_row(
    row: NDArray[np.int32], starts: tuple[int, ...], at: tuple[int, int, int], num_quarantined: int
) -> None:
    """Write the padding as a last segment, and the other fields."""
    ends = (
        starts[LABELS] - starts[INPUT_IDS],
        starts[TEACHER_POSITION_IDS] - starts[TEACHER_INPUT_IDS],
    )
    fill_nothing(row, starts, at, ends)
    row[starts[CU_SEQLENS]] = 0
    row[starts[TEACHER_CU_SEQLENS]] = 0
    row[starts[CU_SEQLENS] + at[SEGMENT] + 2 : starts[TEACHER_CU_SEQLENS]] = ends[STUDENT]
    row[starts[TEACHER_CU_SEQLENS] + at[SEGMENT] + 2 : starts[NUM_QUARANTINED]] = ends[TEACHER]
    row[starts[NUM_QUARANTINED]] = num_quarantined


@compiled
def _fill_tokens(
    out: NDArray[np.int32],
    at: int,
    sample: NDArray[np.uint8],
    tensor: tuple[int, int],
    tokens: tuple[int, int],
    added: tuple[int, int],
) -> int:
    """Write ids with those added; return the text's first place."""
    if added[0] >= 0:
        out[at] = added[0]
        at += 1
    count = tokens[1] - tokens[0]
    _read(out[at : at + count], sample, tensor, tokens[0])
    if added[1] >= 0:
        out[at + count] = added[1]
    return at


@compiled
def _read(
    out: NDArray[np.int32], sample: NDArray[np.uint8], tensor: tuple[int, int], first: int
) -> None:
    start, size = tensor
    values = sample[start + first * size : start + (first + len(out)) * size]
    if size == 1:
        _copy(out, values)
    elif size == 2:
        _copy(out, values.view(np.uint16))
    else:
        _copy(out, values.view(np.uint32))


@compiled
def _copy(out: NDArray[np.int32], values: NDArray[np.unsignedinteger]) -> None:
    # A loop: numba compiles `out[:] = values` to one that is not vectorised.
    for i in range(len(out)):
        out[i] = values[i]


@compiled
def _count_unknown(ids: NDArray[np.int32], vocab_size: int) -> int:
    limit, count = np.uint32(vocab_size), 0
    for i in range(len(ids)):
        count += int(np.uint32(ids[i]) >= limit)
    return count


@compiled
def _sum(sample: NDArray[np.uint8], tensor: tuple[int, int], stop: int) -> int:
    start, size = tensor
    values = sample[start : start + stop * size]
    if size == 1:
        return int(values.sum())
    if size == 2:
        return int(values.view(np.uint16).sum())
    return int(values.view(np.uint32).sum())


@compiled
def _fill_positions(out: NDArray[np.int32], start: int, stop: int) -> None:
    places = out[start:stop]
    for place in range(len(places)):
        places[place] = place


@compiled
def _fill_labels(row: NDArray[np.int32], starts: tuple[int, ...], at: int, end: int) -> None:
    """Write labels and loss_mask: a segment's last token predicts nothing."""
    if end == at:
        return
    input_ids, labels = row[starts[INPUT_IDS] :], row[starts[LABELS] :]
    loss_mask = row[starts[LOSS_MASK] :]
    labels[at : end - 1] = input_ids[at + 1 : end]
    loss_mask[at : end - 1] = _ONE
    labels[end - 1] = PADDING_ID
    loss_mask[end - 1] = 0


@compiled
def _fill_spans(
    spans: NDArray[np.int32],
    sample: NDArray[np.uint8],
    tensors: SampleTensors,
    tokens: tuple[int, int, int, int],
    shift: int,
) -> int:
    """Write a segment's spans; return how many mapped ones leave it.

    `shift` makes a document's teacher token a place in the row. The slowest part of reading, so all
    loops but the running sum are vectorised.
    """
    student_start, student_stop, low, high = tokens
    length = student_stop - student_start
    advances, widths = np.empty(length, np.int32), np.empty(length, np.int32)
    _read(advances, sample, tensors[ADVANCE], student_start)
    _read(widths, sample, tensors[WIDTH], student_start)
    starts, start = advances, np.int32(_sum(sample, tensors[ADVANCE], student_start))
    for i in range(length):
        start += advances[i]
        starts[i] = start
    num_outside = 0
    for i in range(length):
        # Not `starts + widths > high`: of altered samples that may be beyond an int32.
        outside = (starts[i] < low) | (widths[i] > high - starts[i])
        num_outside += (widths[i] > 0) & outside
    for i in range(length):
        stop = starts[i] + widths[i]
        within = (starts[i] >= low) & (widths[i] <= high - starts[i])
        mask = -np.int32((widths[i] > 0) & within)
        spans[2 * i] = (starts[i] + shift) & mask
        spans[2 * i + 1] = (stop + shift) & mask
    return num_outside
