"""The inner loops of packing, compiled by numba: they run over billions of tokens' documents."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

STARTS, ENDS, FORCED = 1, 2, 4
"""Segment flags: holds its document's first token, its last token, is cut without a boundary."""

Place = tuple[int, int]
"""A student token and a teacher token of one document."""


@njit(cache=True)
def split_documents(
    num_student: NDArray[np.int64],
    num_teacher: NDArray[np.int64],
    cut_starts: NDArray[np.int64],
    cut_student: NDArray[np.int64],
    cut_teacher: NDArray[np.int64],
    student_room: NDArray[np.int64],
    teacher_room: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return int64 [G, 6], the segments of D documents in order, columns as in `SEGMENT`.

    Args:
        num_student: int64 [D], student tokens per document.
        num_teacher: int64 [D], teacher tokens per document.
        cut_starts: int64 [D + 1], as in `ShardIndex`.
        cut_student: int64 [C], as in `ShardIndex`.
        cut_teacher: int64 [C], as in `ShardIndex`.
        student_room: int64 [4], tokens per row, and tokens added first, continued and at the end.
        teacher_room: int64 [4], the same for the teacher.
    """
    out = np.empty((len(num_student) + 16, 6), np.int64)
    size = 0
    for document in range(len(num_student)):
        end = (num_student[document], num_teacher[document])
        cuts = slice(cut_starts[document], cut_starts[document + 1])
        document_cuts = (cut_student[cuts], cut_teacher[cuts])
        here, cut = (0, 0), 0
        while here != end:
            stop, pieces, cut = _next_stop(
                here, end, document_cuts, cut, student_room, teacher_room
            )
            start = here
            for piece in range(1, pieces + 1):
                if size == len(out):
                    out = np.concatenate((out, np.empty_like(out)))
                until = (
                    start[0] + (stop[0] - start[0]) * piece // pieces,
                    start[1] + (stop[1] - start[1]) * piece // pieces,
                )
                out[size, 0] = document
                out[size, 1], out[size, 2] = here[0], until[0]
                out[size, 3], out[size, 4] = here[1], until[1]
                out[size, 5] = STARTS * (here == (0, 0)) + ENDS * (until == end)
                out[size, 5] += FORCED * (pieces > 1)
                size += 1
                here = until
    return out[:size]


@njit(cache=True)
def fit_segments(
    student: NDArray[np.int64], teacher: NDArray[np.int64], seq_length: int, teacher_seq_length: int
) -> NDArray[np.int64]:
    """Return the row of each segment, int64 [n], rows numbered from 0 in the order they open.

    A segment goes to the open row that it leaves with the fewest free student tokens.

    Args:
        student: int64 [n], student tokens of each segment, at most `seq_length`.
        teacher: int64 [n], teacher tokens of each segment, at most `teacher_seq_length`.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row.
    """
    row = np.empty(len(student), np.int64)
    free_s = np.empty(len(student), np.int64)
    free_t = np.empty(len(student), np.int64)
    open_row = np.empty(len(student), np.int64)
    num_rows, num_open = 0, 0
    least_s, least_t = student.min(), teacher.min()
    for segment in range(len(student)):
        need_s, need_t = student[segment], teacher[segment]
        best, best_left = -1, seq_length + 1
        for place in range(num_open):
            left = free_s[place] - need_s
            if 0 <= left < best_left and free_t[place] >= need_t:
                best, best_left = place, left
                if left == 0:
                    break
        if best < 0:
            best = num_open
            free_s[best], free_t[best] = seq_length, teacher_seq_length
            open_row[best] = num_rows
            num_rows += 1
            num_open += 1
        row[segment] = open_row[best]
        free_s[best] -= need_s
        free_t[best] -= need_t
        if free_s[best] < least_s or free_t[best] < least_t:
            num_open -= 1
            free_s[best], free_t[best] = free_s[num_open], free_t[num_open]
            open_row[best] = open_row[num_open]
    return row


@njit(cache=True)
def _next_stop(
    here: Place,
    end: Place,
    cuts: tuple[NDArray[np.int64], NDArray[np.int64]],
    cut: int,
    student_room: NDArray[np.int64],
    teacher_room: NDArray[np.int64],
) -> tuple[Place, int, int]:
    """Return where the segment from `here` stops, in how many forced pieces, and the next cut."""
    cut_student, cut_teacher = cuts
    context = 1 if here == (0, 0) else 2
    room_s = here[0] + student_room[0] - student_room[context]
    room_t = here[1] + teacher_room[0] - teacher_room[context]
    if end[0] + student_room[3] <= room_s and end[1] + teacher_room[3] <= room_t:
        return end, 1, cut
    # A cut at the document's own edge divides nothing.
    last_cut = np.searchsorted(cut_student, end[0])
    while cut < last_cut and cut_student[cut] <= here[0]:
        cut += 1
    fitting = cut
    while fitting < last_cut and cut_student[fitting] <= room_s and cut_teacher[fitting] <= room_t:
        fitting += 1
    if fitting > cut:
        return (cut_student[fitting - 1], cut_teacher[fitting - 1]), 1, fitting
    stop = (cut_student[cut], cut_teacher[cut]) if cut < last_cut else end
    sure_s = student_room[0] - max(student_room[1], student_room[2]) - student_room[3]
    sure_t = teacher_room[0] - max(teacher_room[1], teacher_room[2]) - teacher_room[3]
    pieces = max(-(-(stop[0] - here[0]) // sure_s), -(-(stop[1] - here[1]) // sure_t))
    return stop, pieces, cut


@njit(cache=True)
def interleave(shares: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Return which source each place of a period belongs to, and how many of it come before.

    Earliest deadline first: with P the sum of the shares, row j of source i (from 0) may stand at
    places j·P/share to (j + 1)·P/share. Where shares fill the period, there always is such an
    order, and earliest deadline first finds it: of the first n places a source has more than
    n·share/P - 1 and less than n·share/P + 1.

    Args:
        shares: int64 [K], rows of each source in a period, 0 for none.

    Source: Baruah et al. 1996, "Proportionate Progress" (Pfair windows), on one processor.
    """
    period, never = shares.sum(), np.iinfo(np.int64).max
    source, before = np.empty(period, np.uint16), np.empty(period, np.int32)
    done = np.zeros(len(shares), np.int64)
    release = np.where(shares > 0, 0, never)
    # Deadline and number in one word: the least of them is found without a branch.
    urgency = np.zeros(len(shares), np.int64)
    for i in range(len(shares)):
        if shares[i]:
            urgency[i] = (-(-period // shares[i]) << 16) + i
    for place in range(period):
        best = never
        for i in range(len(shares)):
            best = min(best, urgency[i] if release[i] <= place else never)
        i = best & 0xFFFF
        source[place], before[place] = i, done[i]
        done[i] += 1
        release[i] = done[i] * period // shares[i]
        urgency[i] = (-(-(done[i] + 1) * period // shares[i]) << 16) + i
    return source, before
