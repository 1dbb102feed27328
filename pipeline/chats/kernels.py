"""Loops over tokens of renderings.

`cu` arrays [D + 1] bound each document's ranges in one array.
"""

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges
from pipeline.compiled import compiled


@compiled
def find_origins(
    offsets: Ranges,
    cu_tokens: NDArray[np.int64],
    pieces: NDArray[np.int64],
    cu_pieces: NDArray[np.int64],
    closes: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Return the document's bytes that tokens cover, int32 [N, 2]; an empty range for none.

    `offsets` [N, 2] are in renderings; pieces [P, 3] are bytes of own text and the document's range
    after it, in a text that ends at `closes` [P]. A token without a text's byte is at the end of
    the last text, but inside a text (SentencePiece's dummy prefix) there.
    """
    origins = np.empty((len(offsets), 2), np.int32)
    for d in range(len(cu_tokens) - 1):
        first, end = cu_pieces[d], cu_pieces[d + 1]
        place = size = before = np.int64(0)  # the current range's, in the rendering
        if first < end:
            place, size = pieces[first, 0], pieces[first, 2] - pieces[first, 1]
        for i in range(cu_tokens[d], cu_tokens[d + 1]):
            start, stop = offsets[i, 0], offsets[i, 1]
            while first < end and place + size <= start:
                before = max(before, closes[first])
                place += size
                size = np.int64(0)
                first += 1
                if first < end:
                    place += pieces[first, 0]
                    size = pieces[first, 2] - pieces[first, 1]
            if place <= start < stop <= place + size:  # most tokens
                shift = pieces[first, 1] - place
                origins[i, 0], origins[i, 1] = shift + start, shift + stop
                continue
            origins[i, 0] = origins[i, 1] = before
            covers = False
            last, at = first, place
            while last < end and at < stop:
                low = max(start, at)
                high = min(stop, at + pieces[last, 2] - pieces[last, 1])
                if low < high:
                    if not covers:
                        origins[i, 0] = pieces[last, 1] + low - at
                    origins[i, 1] = pieces[last, 1] + high - at
                    covers = True
                at += pieces[last, 2] - pieces[last, 1]
                last += 1
                at += pieces[last, 0] if last < end else 0
            if not covers and first < end and place < start:
                inside = pieces[first, 1] + start - place
                origins[i, 0] = origins[i, 1] = inside
    return origins


@compiled
def mark_overlaps(
    offsets: Ranges,
    cu_tokens: NDArray[np.int64],
    ranges: NDArray[np.int64],
    cu_ranges: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Mark tokens that share a byte with one of their document's ascending ranges."""
    marks = np.zeros(len(offsets), np.bool_)
    for d in range(len(cu_tokens) - 1):
        first, end = cu_ranges[d], cu_ranges[d + 1]
        for i in range(cu_tokens[d], cu_tokens[d + 1]):
            start, stop = offsets[i, 0], offsets[i, 1]
            while first < end and ranges[first, 1] <= start:
                first += 1
            marks[i] = first < end and start < stop and ranges[first, 0] < stop
    return marks


@compiled
def mark_spans(
    marks: NDArray[np.bool_],
    wanted: NDArray[np.bool_],
    spans: Ranges,
    cu_tokens: NDArray[np.int64],
    cu_others: NDArray[np.int64],
) -> None:
    """Mark the other side's tokens to which wanted tokens are mapped."""
    for d in range(len(cu_tokens) - 1):
        for i in range(cu_tokens[d], cu_tokens[d + 1]):
            if wanted[i]:
                for j in range(cu_others[d] + spans[i, 0], cu_others[d] + spans[i, 1]):
                    marks[j] = True


@compiled
def list_runs(
    marks: NDArray[np.bool_], cu_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return runs of marked tokens, counted within each document, and their `cu`."""
    runs = np.empty((len(marks) // 2 + len(cu_tokens), 2), np.int64)
    cu_runs = np.zeros(len(cu_tokens), np.int64)
    count = 0
    for d in range(len(cu_tokens) - 1):
        base, end = cu_tokens[d], cu_tokens[d + 1]
        i = base
        while i < end:
            if not marks[i]:
                i += 1
                continue
            runs[count, 0] = i - base
            while i < end and marks[i]:
                i += 1
            runs[count, 1] = i - base
            count += 1
        cu_runs[d + 1] = count
    return runs[:count].copy(), cu_runs


@compiled
def count_seams(
    rendered: tuple[Ranges, Ranges],
    origins: tuple[Ranges, Ranges],
    cu_tokens: tuple[NDArray[np.int64], NDArray[np.int64]],
    wanted: NDArray[np.bool_],
    spans: Ranges,
    texts: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    cu_texts: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Count each document's wanted student tokens across a seam, and the lone ones, int64 [D, 2].

    A token is alone unless its first teacher token begins at the same place in the document, after
    equal bytes of the template. `texts` are all renderings' bytes.
    """
    counts = np.zeros((len(cu_tokens[0]) - 1, 2), np.int64)
    for d in range(len(counts)):
        for i in range(cu_tokens[0][d], cu_tokens[0][d + 1]):
            start, stop = origins[0][i, 0], origins[0][i, 1]
            own = rendered[0][i, 1] - rendered[0][i, 0] - (stop - start)
            if not wanted[i] or start == stop or own == 0:
                continue
            counts[d, 0] += 1
            j = cu_tokens[1][d] + spans[i, 0]
            if spans[i, 0] == spans[i, 1] or origins[1][j, 0] != start:
                counts[d, 1] += 1
                continue
            size = origins[1][j, 1] - origins[1][j, 0]
            other = rendered[1][j, 1] - rendered[1][j, 0] - size
            a = cu_texts[0][d] + rendered[0][i, 0]
            b = cu_texts[1][d] + rendered[1][j, 0]
            same = own == other
            for k in range(own if same else 0):
                same = same and texts[0][a + k] == texts[1][b + k]
            counts[d, 1] += 0 if same else 1
    return counts


@compiled
def find_tiled(
    origins: Ranges, cu_tokens: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mark documents with each byte covered once, in order; `sizes` are in bytes."""
    tiled = np.empty(len(sizes), np.bool_)
    for d in range(len(sizes)):
        end = np.int64(0)
        tiled[d] = True
        for i in range(cu_tokens[d], cu_tokens[d + 1]):
            if origins[i, 0] != end:
                tiled[d] = False
                break
            end = origins[i, 1]
        tiled[d] = tiled[d] and end == sizes[d]
    return tiled


@compiled
def find_turn_cuts(
    ends: NDArray[np.int64],
    cu_ends: NDArray[np.int64],
    rendered: tuple[Ranges, Ranges],
    origins: tuple[Ranges, Ranges],
    cu_tokens: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Return the student and teacher token before which turns end, int64 [E, 2].

    `ends` [E, 2] are in both renderings. A cut comes after the token with the end's last byte; (0,
    0) without one, or if tokens don't divide the document there.
    """
    cuts = np.zeros((len(ends), 2), np.int64)
    for d in range(len(cu_ends) - 1):
        i, j = cu_tokens[0][d], cu_tokens[1][d]
        stop_i, stop_j = cu_tokens[0][d + 1], cu_tokens[1][d + 1]
        for e in range(cu_ends[d], cu_ends[d + 1]):
            while i < stop_i and rendered[0][i, 1] < ends[e, 0]:
                i += 1
            while j < stop_j and rendered[1][j, 1] < ends[e, 1]:
                j += 1
            if i + 1 >= stop_i or j + 1 >= stop_j:
                break
            before = max(origins[0][i, 1], origins[1][j, 1])
            if before <= min(origins[0][i + 1, 0], origins[1][j + 1, 0]):
                cuts[e, 0] = i + 1 - cu_tokens[0][d]
                cuts[e, 1] = j + 1 - cu_tokens[1][d]
    return cuts


@compiled
def choose_cuts(
    cuts: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    turns: NDArray[np.int64],
    cu_turns: NDArray[np.int64],
    origins: Ranges,
    cu_tokens: NDArray[np.int64],
    stride: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where chats can be cut, int64 [C, 3], and its `cu`.

    Columns are student token, teacher token, and 1 at a turn's end. `cuts` (`find_cut_points`) stay
    before tokens that cover text; in each `stride` student tokens the last of `turns` replaces
    them.
    """
    starts, first, second = cuts
    rows = np.empty((len(first) + len(turns), 3), np.int64)
    cu_rows = np.zeros(len(starts), np.int64)
    count = 0
    for d in range(len(starts) - 1):
        cut, turn = starts[d], cu_turns[d]
        while cut < starts[d + 1] or turn < cu_turns[d + 1]:
            of_cut = of_turn = np.int64(2**62)
            if cut < starts[d + 1]:
                of_cut = first[cut] // stride
            if turn < cu_turns[d + 1]:
                of_turn = turns[turn, 0] // stride
            if of_turn <= of_cut:
                last = turn
                while last + 1 < cu_turns[d + 1] and turns[last + 1, 0] // stride == of_turn:
                    last += 1
                rows[count] = turns[last, 0], turns[last, 1], 1
                count += 1
                turn = last + 1
                cut += 1 if of_cut == of_turn else 0
                continue
            token = cu_tokens[d] + first[cut]
            if origins[token, 1] > origins[token, 0]:
                rows[count] = first[cut], second[cut], 0
                count += 1
            cut += 1
        cu_rows[d + 1] = count
    return rows[:count].copy(), cu_rows
