"""Loops that turn a teacher's next tokens into the student's, place by place."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled_in_place
from pipeline.distributions.prefixes import NONE, Tables, find_prefix, same_bytes

AMID, START = 0, 1
"""Rows of `Tables.mapped`."""

LEAST_EXTENDING = 0.05
"""Stored tokens that continue from inside a teacher token must hold this mass: with less, much of
the condition isn't stored. Measured: 11 % on average below 0.05, 6 % and less above."""

MOST_ENDING = 0.1
"""A teacher token that ends exactly where the student is says nothing of the bytes behind it;
of what is consistent with the bytes read, it may hold less than this share."""

FREE = np.uint8(255)
"""What `scratch` holds for a student token that a label's distribution doesn't have yet."""


class Edges(NamedTuple):
    """What is around texts.

    Attributes:
        student_context: ids before a segment that starts or continues a document, -1 for none.
        student_end: id after a document, -1 for none.
        teacher_context: as `student_context`.
        teacher_end: as `student_end`.
        student_skip: 1 if only the student's tokens begin with a space that isn't in the text.
        teacher_skip: 1 if only the teacher's do.
        always_skips: whether that does not depend on the text.
    """

    student_context: tuple[int, int]
    student_end: int
    teacher_context: tuple[int, int]
    teacher_end: int
    student_skip: int
    teacher_skip: int
    always_skips: bool


class RowFields(NamedTuple):
    """Fields of one row of S student and T teacher tokens, as `pipeline.streaming.Rows` has them.

    All rows have `teacher_losses` here, float32 [T], nats, NaN where none is known.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]
    teacher_spans: NDArray[np.int32]
    teacher_input_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    teacher_cu_seqlens: NDArray[np.int32]
    teacher_losses: NDArray[np.float32]


class Entries(NamedTuple):
    """What a teacher expects after each of its tokens: ids and probs [T, K], -1 behind the last.

    The last `draws` of the K are draws; any of them may be -1.
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    draws: int


class LabelEntries(NamedTuple):
    """What that means for each label: the student's ids and probs [S, K], -1 behind the last.

    `moved`, [S], is `moved_mass` of `pipeline.streaming.Rows`.
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    moved: NDArray[np.float32]


class OwnToken(NamedTuple):
    """The teacher's token with which a text goes on where a label starts, -1 if there is none.

    Losses are in nats; `loss_behind` is the sum over the tokens behind it that overlap the label.
    """

    label: int
    token_id: int
    loss: float
    loss_behind: float


@compiled_in_place
def map_places(
    row: RowFields,
    expected: Entries,
    tables: Tables,
    edges: Edges,
    scratch: NDArray[np.uint8],
    out: LabelEntries,
) -> None:
    """Write the distribution of each label of a row, see `pipeline.distributions.mapping`."""
    out.ids[:] = NONE
    out.probs[:] = 0
    out.moved[:] = 0
    for segment in range(len(row.cu_seqlens) - 1):
        _map_segment(row, segment, expected, tables, edges, scratch, out)


@compiled_in_place
def _map_segment(
    row: RowFields,
    segment: int,
    expected: Entries,
    tables: Tables,
    edges: Edges,
    scratch: NDArray[np.uint8],
    out: LabelEntries,
) -> None:
    """Walk over a segment's student and teacher tokens side by side, byte by byte.

    `token`, `offset` is where the walk is: at a byte of a teacher token. Where the spans say that
    a student token starts on a teacher token (the label before ends on the one before), they are
    trusted; what was written since `anchor`, the last such place, is taken back if the walk
    arrived elsewhere. So a segment that is cut inside a teacher token gives nothing wrong.
    """
    start, end = row.cu_seqlens[segment], row.cu_seqlens[segment + 1]
    t_start, t_end = row.teacher_cu_seqlens[segment], row.teacher_cu_seqlens[segment + 1]
    if start == end or t_start == t_end:
        return
    first = start + _is_context(row.input_ids[start], edges.student_context)
    token = t_start + _is_context(row.teacher_input_ids[t_start], edges.teacher_context)
    if t_end > token and row.teacher_input_ids[t_end - 1] == edges.teacher_end:
        t_end -= 1
    offset, before, anchor, known, confirmed = 0, NONE, start, True, False
    last, losses = end - 1, row.teacher_losses
    for at in range(first, end):
        place, label = at - 1, row.input_ids[at]
        span, stop = NONE, NONE
        if place >= start:
            span, stop = row.teacher_spans[place, 0], row.teacher_spans[place, 1]
        if at == end - 1 and label == edges.student_end and span == stop >= 0:
            last = place
            if row.loss_mask[place] > 0 and t_end > t_start:
                none = OwnToken(label, NONE, 0.0, 0.0)
                _map_boundary(tables.mapped[AMID], expected, t_end - 1, none, scratch, out, place)
            break
        here = known and (place < start or (span == token and (offset > 0 or before == NONE)))
        if before >= 0 and span == before < stop:
            here = known and token == span and offset == 0
            if known and not here:
                _take_back(out, anchor, place)
            known, confirmed, token, offset, anchor, here = True, True, span, 0, place, True
        mode, found = AMID, (NONE, 0)
        if here:
            found = _advance(row, label, 0, token, offset, t_end, tables)
            if at == first and edges.student_skip + edges.teacher_skip:
                mode, found = _start_of_text(row, label, token, found, t_end, tables, edges)
        if found[0] == NONE or (place >= start and stop != found[0] + (found[1] > 0)):
            if known:
                _take_back(out, anchor, place)
            known = False
        elif place >= start and token > t_start and row.loss_mask[place] > 0:
            if offset:
                prefix = (row.teacher_input_ids[token], offset)
                _map_inside(prefix, expected, token - 1, tables, scratch, out, place)
            elif mode != NONE:
                behind = 0.0
                for other in range(token + 1, stop):
                    behind += losses[other]
                own = OwnToken(label, row.teacher_input_ids[token], losses[token], behind)
                _map_boundary(tables.mapped[mode], expected, token - 1, own, scratch, out, place)
        before = stop if span < stop else NONE
        token, offset = found
    if not confirmed:
        _take_back(out, start, last)


@compiled_in_place
def _is_context(token_id: int, context: tuple[int, int]) -> int:
    return 1 if token_id >= 0 and (token_id == context[0] or token_id == context[1]) else 0


@compiled_in_place
def _take_back(out: LabelEntries, start: int, stop: int) -> None:
    for place in range(start, stop):
        out.ids[place] = NONE
        out.probs[place] = 0
        out.moved[place] = 0


@compiled_in_place
def _start_of_text(
    row: RowFields,
    label: int,
    token: int,
    plain: tuple[int, int],
    t_end: int,
    tables: Tables,
    edges: Edges,
) -> tuple[int, tuple[int, int]]:
    """Return which table a segment's first label takes, -1 for none, and where the walk continues.

    One tokenizer puts a space before a text, the other doesn't, and the segment may continue its
    document: whichever fits is the case. Spaces fit either way, and give nothing.
    """
    none = (NONE, 0)
    if token >= t_end:
        return NONE, none
    spaced, other = none, row.teacher_input_ids[token]
    if edges.student_skip:
        own = _first_byte(label, tables.student_bytes, tables.student_starts)
    else:
        own = _first_byte(other, tables.teacher_bytes, tables.teacher_starts)
    if own == 32:
        spaced = _advance(row, label, edges.student_skip, token, edges.teacher_skip, t_end, tables)
    if spaced[0] == NONE:
        return (AMID if edges.always_skips else NONE), plain
    if plain[0] == NONE:
        return START, spaced
    return NONE, none


@compiled_in_place
def _first_byte(token_id: int, flat: NDArray[np.uint8], starts: NDArray[np.int64]) -> int:
    if token_id >= len(starts) - 1 or starts[token_id] == starts[token_id + 1]:
        return NONE
    return int(flat[starts[token_id]])


@compiled_in_place
def _advance(
    row: RowFields, label: int, skip: int, token: int, offset: int, t_end: int, tables: Tables
) -> tuple[int, int]:
    """Return where a student token's bytes end among the teacher's; (-1, 0) if they differ."""
    none = (NONE, 0)
    if label >= len(tables.student_starts) - 1:
        return none
    at, end = tables.student_starts[label] + skip, tables.student_starts[label + 1]
    if at >= end:
        return none
    while at < end:
        if token >= t_end:
            return none
        teacher_id = row.teacher_input_ids[token]
        if teacher_id >= len(tables.teacher_starts) - 1:
            return none
        place = tables.teacher_starts[teacher_id] + offset
        stop = tables.teacher_starts[teacher_id + 1]
        if place - offset == stop:  # one whose bytes aren't known
            return none
        while at < end and place < stop:
            if tables.student_bytes[at] != tables.teacher_bytes[place]:
                return none
            at += 1
            place += 1
        offset = place - tables.teacher_starts[teacher_id]
        if place == stop:
            token, offset = token + 1, 0
    return token, offset


@compiled_in_place
def _map_boundary(
    mapped: NDArray[np.int32],
    expected: Entries,
    state: int,
    own: OwnToken,
    scratch: NDArray[np.uint8],
    out: LabelEntries,
    place: int,
) -> None:
    """Write what the teacher expects behind its place `state` for the label at `place`."""
    if expected.ids[state, 0] < 0:  # of which nothing is stored: the label's own loss says little
        return
    count, stored = 0, np.float32(-1)
    for entry in range(expected.ids.shape[1] - expected.draws):
        teacher_id = expected.ids[state, entry]
        if teacher_id < 0:
            break
        mass = expected.probs[state, entry]
        if teacher_id == own.token_id:
            stored = mass
        if teacher_id < len(mapped) and mapped[teacher_id] >= 0:
            count = _add(out, place, count, mapped[teacher_id], mass, scratch)
    if own.token_id >= 0 and (stored < 0 or mapped[own.token_id] != own.label):
        room = expected.ids.shape[1] - expected.draws
        count = _give_label(mapped[own.token_id], stored, own, (count, room), scratch, out, place)
    total = np.float32(0)
    for slot in range(count):
        total += out.probs[place, slot]
    # Quantised log-probabilities may add up to a little more than 1.
    _finish(out, place, count, max(total, np.float32(1)), scratch)
    if expected.draws:
        _map_draws(mapped, expected, state, out, place)


@compiled_in_place
def _map_draws(
    mapped: NDArray[np.int32], expected: Entries, state: int, out: LabelEntries, place: int
) -> None:
    """Write the draws, each for itself: added to entries, they could not be told from them."""
    for entry in range(expected.ids.shape[1] - expected.draws, expected.ids.shape[1]):
        teacher_id = expected.ids[state, entry]
        if 0 <= teacher_id < len(mapped) and mapped[teacher_id] >= 0:
            out.ids[place, entry] = mapped[teacher_id]
            out.probs[place, entry] = expected.probs[state, entry]


@compiled_in_place
def _give_label(
    to: int,
    stored: np.float32,
    own: OwnToken,
    counts: tuple[int, int],
    scratch: NDArray[np.uint8],
    out: LabelEntries,
    place: int,
) -> int:
    """Give the label its part of the mass of the text's own next token; return the entries' count.

    The token's bytes give to `to`; its mass is `stored` or, below 0, none of the entries, and its
    loss says what it is. Of the mass the label gets what the tokens behind it leave, up to the
    label's end. `counts` are of the entries and of the room for them: where there is none, the
    label takes the place of the smallest entry, whose mass goes to the residual.
    """
    count, room = counts
    mass = np.exp(-own.loss_behind) * (stored if stored >= 0 else np.exp(-own.loss))
    if not mass > 0:  # a loss isn't known
        return count
    if to != own.label:
        out.moved[place] = mass
    if stored >= 0 and to >= 0:
        slot = scratch[to]
        out.probs[place, slot] -= mass
        if out.probs[place, slot] <= 0:
            count = _drop(out, place, count, slot, scratch)
    if scratch[own.label] == FREE and count == room:
        least = 0
        for slot in range(1, count):
            least = slot if out.probs[place, slot] < out.probs[place, least] else least
        count = _drop(out, place, count, least, scratch)
    return _add(out, place, count, own.label, mass, scratch)


@compiled_in_place
def _drop(out: LabelEntries, place: int, count: int, slot: int, scratch: NDArray[np.uint8]) -> int:
    """Leave an entry's mass to the residual; return how many entries there are."""
    scratch[out.ids[place, slot]] = FREE
    last = count - 1
    if slot < last:
        out.ids[place, slot], out.probs[place, slot] = out.ids[place, last], out.probs[place, last]
        scratch[out.ids[place, slot]] = slot
    out.ids[place, last], out.probs[place, last] = NONE, 0
    return last


@compiled_in_place
def _map_inside(
    prefix: tuple[int, int],
    expected: Entries,
    state: int,
    tables: Tables,
    scratch: NDArray[np.uint8],
    out: LabelEntries,
    place: int,
) -> None:
    """Write what the teacher expects behind `state`, given that it begins with some bytes.

    `prefix` names them: a teacher token and how many of its bytes. Draws aren't counted: what they
    say is right on average, a quotient of it isn't.
    """
    width = prefix[1]
    at = tables.teacher_starts[prefix[0]]
    given = tables.teacher_bytes[at : at + width]
    count, extending, ending = 0, np.float32(0), np.float32(0)
    for entry in range(expected.ids.shape[1] - expected.draws):
        teacher_id = expected.ids[state, entry]
        if teacher_id < 0:
            break
        if teacher_id >= len(tables.teacher_starts) - 1:
            continue
        at, stop = tables.teacher_starts[teacher_id], tables.teacher_starts[teacher_id + 1]
        if stop - at < width or not same_bytes(tables.teacher_bytes[at : at + width], given):
            continue
        mass = expected.probs[state, entry]
        if stop - at == width:
            ending += mass
            continue
        extending += mass
        student_id = find_prefix(tables.teacher_bytes[at + width : stop], tables)
        if student_id >= 0:
            count = _add(out, place, count, student_id, mass, scratch)
    _finish(out, place, count, extending, scratch)
    if extending < LEAST_EXTENDING or ending >= MOST_ENDING * (extending + ending):
        _take_back(out, place, place + 1)


@compiled_in_place
def _add(
    out: LabelEntries,
    place: int,
    count: int,
    token_id: int,
    mass: float,
    scratch: NDArray[np.uint8],
) -> int:
    """Add mass to a token; `scratch` says where each token is. Return how many there are.

    A label's entries are `out`'s at `place`, here and below: making views of them takes longer.
    """
    slot = scratch[token_id]
    if slot != FREE:
        out.probs[place, slot] += mass
        return count
    scratch[token_id] = count
    out.ids[place, count], out.probs[place, count] = token_id, mass
    return count + 1


@compiled_in_place
def _finish(
    out: LabelEntries, place: int, count: int, whole: np.float32, scratch: NDArray[np.uint8]
) -> None:
    """Divide by `whole`, sort by falling mass, and free `scratch`."""
    for slot in range(count):
        scratch[out.ids[place, slot]] = FREE
        token_id, mass = out.ids[place, slot], out.probs[place, slot] / whole
        before = slot
        while before > 0 and out.probs[place, before - 1] < mass:
            out.ids[place, before] = out.ids[place, before - 1]
            out.probs[place, before] = out.probs[place, before - 1]
            before -= 1
        out.ids[place, before], out.probs[place, before] = token_id, mass
