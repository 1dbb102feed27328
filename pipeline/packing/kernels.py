"""The inner loops of packing, compiled by numba."""

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled

STARTS, ENDS, FORCED = 1, 2, 4
"""Segment flags: holds its document's first token, its last token, is cut without a boundary."""

Place = tuple[int, int]
"""A student token and a teacher token of one document."""


@compiled
def split_documents(
    num_student: NDArray[np.int64],
    num_teacher: NDArray[np.int64],
    cut_starts: NDArray[np.int64],
    cut_student: NDArray[np.integer],
    cut_teacher: NDArray[np.integer],
    at_turn: NDArray[np.integer],
    student_room: NDArray[np.int64],
    teacher_room: NDArray[np.int64],
) -> NDArray[np.uint32]:
    """Split documents into segments, [G, 6], columns as in `SEGMENT`.

    Cuts are as in `ShardIndex`; `at_turn` marks chats' turns, and is empty for texts. Rooms are as
    in `PackingRules`. ValueError if a document's cuts don't rise.
    """
    whole_s = student_room[0] - student_room[1] - student_room[3]
    whole_t = teacher_room[0] - teacher_room[1] - teacher_room[3]
    # Room for most shards' segments, so it seldom grows; unwritten memory costs nothing.
    out = np.empty((len(num_student) * 2 + 16, 6), np.uint32)
    size = 0
    for document in range(len(num_student)):
        here, end = (0, 0), (num_student[document], num_teacher[document])
        # The fast path, since most documents fit: calls and cuts cost more than all else.
        if size < len(out) and end != here and end[0] <= whole_s and end[1] <= whole_t:
            out[size, 0], out[size, 5] = document, STARTS | ENDS
            out[size, 1], out[size, 2] = 0, end[0]
            out[size, 3], out[size, 4] = 0, end[1]
            size += 1
            continue
        cut, cut_end = cut_starts[document], cut_starts[document + 1]
        while here != end:
            stop, pieces, cut = _next_stop(
                here,
                end,
                cut_student,
                cut_teacher,
                at_turn,
                cut,
                cut_end,
                student_room,
                teacher_room,
            )
            if not (here[0] <= stop[0] <= end[0] and here[1] <= stop[1] <= end[1] and here != stop):
                raise ValueError("cut points are out of order: the index was altered")
            while size + pieces > len(out):
                out = np.concatenate((out, np.empty_like(out)))
            _write_pieces(out, size, pieces, document, here, stop, end)
            size += pieces
            here = stop
    return out[:size]


@compiled
def measure_segments(
    segments: NDArray[np.uint32], student_room: NDArray[np.int64], teacher_room: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return segments' student and teacher tokens, added ones included, and their share of a row.

    The share is the larger side's.
    """
    student = np.empty(len(segments), np.int64)
    teacher = np.empty(len(segments), np.int64)
    fill = np.empty(len(segments), np.float64)
    for place in range(len(segments)):
        flags = segments[place, 5]
        before, after = (1 if flags & STARTS else 2), (1 if flags & ENDS else 0)
        own = np.int64(segments[place, 2]) - np.int64(segments[place, 1])
        student[place] = own + student_room[before] + after * student_room[3]
        own = np.int64(segments[place, 4]) - np.int64(segments[place, 3])
        teacher[place] = own + teacher_room[before] + after * teacher_room[3]
        fill[place] = max(student[place] / student_room[0], teacher[place] / teacher_room[0])
    return student, teacher, fill


@compiled
def find_unsound(
    segments: NDArray[np.uint32],
    row_starts: NDArray[np.int64],
    num_student: NDArray[np.uint32],
    num_teacher: NDArray[np.uint32],
    student_room: NDArray[np.int64],
    teacher_room: NDArray[np.int64],
) -> int:
    """Return the first row of a plan with an impossible segment or too many tokens, or -1."""
    for row in range(len(row_starts) - 1):
        room_s, room_t = student_room[0], teacher_room[0]
        for place in range(row_starts[row], row_starts[row + 1]):
            document, flags = segments[place, 0], segments[place, 5]
            if document >= len(num_student):
                return row
            start_s, stop_s = np.int64(segments[place, 1]), np.int64(segments[place, 2])
            start_t, stop_t = np.int64(segments[place, 3]), np.int64(segments[place, 4])
            end_s, end_t = np.int64(num_student[document]), np.int64(num_teacher[document])
            starts, ends = start_s == start_t == 0, stop_s == end_s and stop_t == end_t
            expected, before = STARTS * starts + ENDS * ends, (1 if starts else 2)
            room_s -= stop_s - start_s + student_room[before] + ends * student_room[3]
            room_t -= stop_t - start_t + teacher_room[before] + ends * teacher_room[3]
            within = start_s <= stop_s <= end_s and start_t <= stop_t <= end_t
            if not within or flags & ~FORCED != expected or min(room_s, room_t) < 0:
                return row
    return -1


@compiled
def fit_segments(
    student: NDArray[np.int64], teacher: NDArray[np.int64], seq_length: int, teacher_seq_length: int
) -> NDArray[np.int64]:
    """Return each segment's row by best fit; rows count in the order they open.

    Best is the row left with the fewest free student tokens. `seq_length` is below 2**31.
    """
    row = np.empty(len(student), np.int64)
    free_s = np.empty(len(student), np.int64)
    free_t = np.empty(len(student), np.int64)
    open_row = np.empty(len(student), np.int64)
    num_rows, num_open = 0, 0
    least_s, least_t = student.min(), teacher.min()
    none = np.iinfo(np.int64).max
    for segment in range(len(student)):
        need_s, need_t = student[segment], teacher[segment]
        # Free tokens and place in one word: SIMD finds the least without a branch.
        best = none
        for candidate in range(num_open):
            left = free_s[candidate] - need_s
            fits = (left >= 0) & (free_t[candidate] >= need_t)
            best = min(best, (left << 32) + candidate if fits else none)
        place = best & 0xFFFFFFFF
        if best == none:
            place = num_open
            free_s[place], free_t[place] = seq_length, teacher_seq_length
            open_row[place] = num_rows
            num_rows += 1
            num_open += 1
        row[segment] = open_row[place]
        free_s[place] -= need_s
        free_t[place] -= need_t
        if free_s[place] < least_s or free_t[place] < least_t:
            num_open -= 1
            free_s[place], free_t[place] = free_s[num_open], free_t[num_open]
            open_row[place] = open_row[num_open]
    return row


@compiled
def _next_stop(
    here: Place,
    end: Place,
    cut_student: NDArray[np.integer],
    cut_teacher: NDArray[np.integer],
    at_turn: NDArray[np.integer],
    cut: int,
    cut_end: int,
    student_room: NDArray[np.int64],
    teacher_room: NDArray[np.int64],
) -> tuple[Place, int, int]:
    """Return the end of the segment from `here`, its number of forced pieces, and the next cut."""
    context = 1 if here == (0, 0) else 2
    room_s = here[0] + student_room[0] - student_room[context]
    room_t = here[1] + teacher_room[0] - teacher_room[context]
    if end[0] + student_room[3] <= room_s and end[1] + teacher_room[3] <= room_t:
        return end, 1, cut
    # A cut at the document's own edge divides nothing.
    last_cut = _first_above(cut_student, cut, cut_end, end[0] - 1)
    while cut < last_cut and cut_student[cut] <= here[0]:
        cut += 1
    fitting = min(
        _first_above(cut_student, cut, last_cut, room_s),
        _first_above(cut_teacher, cut, last_cut, room_t),
    )
    if fitting > cut:
        for turn in range(fitting - 1, cut - 1, -1) if len(at_turn) else range(0):
            if at_turn[turn]:
                fitting = turn + 1
                break
        return (int(cut_student[fitting - 1]), int(cut_teacher[fitting - 1])), 1, fitting
    stop = (int(cut_student[cut]), int(cut_teacher[cut])) if cut < last_cut else end
    sure_s = student_room[0] - max(student_room[1], student_room[2]) - student_room[3]
    sure_t = teacher_room[0] - max(teacher_room[1], teacher_room[2]) - teacher_room[3]
    pieces = max(-(-(stop[0] - here[0]) // sure_s), -(-(stop[1] - here[1]) // sure_t))
    return stop, pieces, cut


@compiled
def _first_above(values: NDArray[np.integer], start: int, stop: int, limit: int) -> int:
    while start < stop:
        middle = (start + stop) // 2
        if values[middle] > limit:
            stop = middle
        else:
            start = middle + 1
    return start


@compiled
def _write_pieces(
    out: NDArray[np.uint32],
    size: int,
    pieces: int,
    document: int,
    start: Place,
    stop: Place,
    end: Place,
) -> None:
    here = start
    for piece in range(1, pieces + 1):
        until = stop
        if piece < pieces:
            until = (
                start[0] + (stop[0] - start[0]) * piece // pieces,
                start[1] + (stop[1] - start[1]) * piece // pieces,
            )
        out[size, 0] = document
        out[size, 1], out[size, 2] = here[0], until[0]
        out[size, 3], out[size, 4] = here[1], until[1]
        out[size, 5] = STARTS * (here == (0, 0)) + ENDS * (until == end) + FORCED * (pieces > 1)
        here = until
        size += 1


@compiled
def interleave(shares: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Return the source of each place of a period, and that source's earlier places.

    Earliest deadline first: row j of a source may be at places j·P/share to (j + 1)·P/share, with P
    the sum of the shares.

    Source: Baruah et al. 1996, "Proportionate Progress" (Pfair windows), on one processor.
    """
    period, never = shares.sum(), np.iinfo(np.int64).max
    source, before = np.empty(period, np.uint16), np.empty(period, np.int32)
    done = np.zeros(len(shares), np.int64)
    release = np.where(shares > 0, 0, never)
    # Deadline and number in one word: the least is found without a branch.
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
