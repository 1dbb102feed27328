"""Loops over two tokenizations of a text."""

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges
from pipeline.compiled import compiled


@compiled
def merge_spans(
    student_offsets: Ranges,
    student_cu: NDArray[np.int64],
    teacher_offsets: Ranges,
    teacher_cu: NDArray[np.int64],
    tiles: NDArray[np.bool_],
) -> NDArray[np.int32]:
    """Find for each student token the minimal run of teacher tokens that overlap it.

    One O(N + M) merge, with the result of Algorithm 1. Runs neither start nor end with a token
    without bytes. An unmapped token's run is empty, at the start of the last one before it.

    Offsets don't decrease within a document; `tiles` [D] marks those that tile the text on both
    sides.
    """
    teacher_spans = np.empty((len(student_offsets), 2), np.int32)
    for d in range(len(student_cu) - 1):
        student = student_offsets[student_cu[d] : student_cu[d + 1]]
        teacher = teacher_offsets[teacher_cu[d] : teacher_cu[d + 1]]
        spans = teacher_spans[student_cu[d] : student_cu[d + 1]]
        if tiles[d]:
            _merge_tiling(student, teacher, spans)
        else:
            _merge_monotone(student, teacher, spans)
    return teacher_spans


@compiled
def _merge_tiling(student: Ranges, teacher: Ranges, spans: Ranges) -> None:
    """Merge sides that tile the text."""
    one = np.uintp(1)  # unsigned indices spare numba the check for negative ones
    last = np.uintp(max(len(teacher), 1) - 1)
    first = last_start = np.uintp(0)
    first_end = teacher[0, 1] if len(teacher) else np.int32(0)
    for i in range(len(student)):
        start, end = student[i, 0], student[i, 1]
        while first_end <= start and first < last:
            first += one
            first_end = teacher[first, 1]
        if start == end:
            spans[i, 0] = spans[i, 1] = last_start
            continue
        last_start = first
        while first_end < end and first < last:
            first += one
            first_end = teacher[first, 1]
        spans[i, 0] = last_start
        spans[i, 1] = first + one


@compiled
def _merge_monotone(student: Ranges, teacher: Ranges, spans: Ranges) -> None:
    one = np.uintp(1)
    stop = np.uintp(len(teacher))
    first = last_start = np.uintp(0)
    for i in range(len(student)):
        start, end = student[i, 0], student[i, 1]
        while first < stop and teacher[first, 1] <= start:
            first += one
        a = b = first
        while b < stop and teacher[b, 0] < end:
            b += one
        while b > a and teacher[b - one, 0] == teacher[b - one, 1]:
            b -= one
        while a < b and teacher[a, 0] == teacher[a, 1]:
            a += one
        if start == end or a == b:
            a = b = last_start
        last_start = a
        spans[i, 0] = a
        spans[i, 1] = b


@compiled
def first_non_monotone(
    byte_offsets: Ranges, cu_tokens: NDArray[np.int64], tiles: NDArray[np.bool_]
) -> int:
    """Return the first document whose starts or ends decrease, or -1; tiling ones are skipped."""
    for d in range(len(cu_tokens) - 1):
        if tiles[d]:
            continue
        own = byte_offsets[cu_tokens[d] : cu_tokens[d + 1]]
        start = end = np.int64(0)
        for i in range(len(own)):
            a, b = own[i, 0], own[i, 1]
            if a < start or b < end or b < a:
                return d
            start, end = a, b
    return -1


@compiled
def find_cut_points(
    student_offsets: Ranges,
    student_cu: NDArray[np.int64],
    teacher_offsets: Ranges,
    teacher_cu: NDArray[np.int64],
    teacher_spans: Ranges,
    stride: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find byte boundaries shared by both tokenizations, the last of every `stride` tokens.

    A cut (i, j) divides a document at one byte, before student token i and teacher token j; both
    parts hold tokens of both sides. Returns cut_starts [D + 1], cut_student [C] and cut_teacher
    [C].
    """
    num_documents = len(student_cu) - 1
    cut_starts = np.zeros(num_documents + 1, np.int64)
    cut_student = np.empty(len(student_offsets) // stride + num_documents, np.int64)
    cut_teacher = np.empty(len(cut_student), np.int64)
    count = 0
    for d in range(num_documents):
        base, teacher_base = student_cu[d], teacher_cu[d]
        num_tokens = student_cu[d + 1] - base
        num_teacher_tokens = teacher_cu[d + 1] - teacher_base
        for block in range(0, num_tokens, stride):
            for i in range(min(block + stride, num_tokens) - 1, max(block, 1) - 1, -1):
                j = teacher_spans[base + i - 1, 1]
                if teacher_spans[base + i - 1, 0] == j or j == num_teacher_tokens:
                    continue
                student_end = student_offsets[base + i - 1, 1]
                teacher_end = teacher_offsets[teacher_base + j - 1, 1]
                student_start = student_offsets[base + i, 0]
                teacher_start = teacher_offsets[teacher_base + j, 0]
                if max(student_end, teacher_end) <= min(student_start, teacher_start):
                    cut_student[count] = i
                    cut_teacher[count] = j
                    count += 1
                    break
        cut_starts[d + 1] = count
    return cut_starts, cut_student[:count].copy(), cut_teacher[:count].copy()
