"""Loops that map a teacher's next tokens to the student's, label by label."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled_in_place
from pipeline.distributions.prefixes import NONE, Tables, find_prefix, same_bytes
from pipeline.distributions.walk import AMID, END, Edges, LabelStarts

LEAST_EXTENDING = 0.05
"""Known tokens that continue from inside a teacher token must hold this mass: with less, much of
the condition isn't known. Measured: 11 % on average below 0.05, 6 % and less above."""

MOST_ENDING = 0.1
"""A teacher token that ends exactly where the student is says nothing about the bytes after it.
Among the tokens that begin with the bytes read, it must hold less than this share."""

FREE = np.uint16(0xFFFF)
"""In `scratch`: a student token that a label's distribution doesn't have yet."""


class Entries(NamedTuple):
    """A teacher's expectations after each of its tokens, [T, K]; ids are -1 after the last.

    Those after the first `exact` were drawn, without probabilities of their own.
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    exact: int


class LabelEntries(NamedTuple):
    """The same mapped to each label, [S, K]; `own_ids` [S] are `Rows.own_token_ids`."""

    ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    own_ids: NDArray[np.int32]


@compiled_in_place
def map_labels(
    teacher_ids: NDArray[np.int32],
    starts: LabelStarts,
    expected: Entries,
    tables: Tables,
    edges: Edges,
    scratch: NDArray[np.uint16],
    out: LabelEntries,
) -> None:
    """Write the distribution of each label of a row."""
    out.ids[:] = NONE
    out.probs[:] = 0
    out.own_ids[:] = NONE
    for place in range(len(starts.token)):
        token, offset = starts.token[place], starts.offset[place]
        if token < 0 or expected.ids[token - 1, 0] < 0:
            continue
        where = starts.where[place]
        if offset:
            prefix = (teacher_ids[token], offset)
            _map_inside(prefix, expected, token - 1, tables, scratch, out, place)
        else:
            table = AMID if where == END else where
            _map_boundary(tables, table, expected, token - 1, scratch, out, place)
        if out.ids[place, 0] >= 0:
            out.own_ids[place] = _own_id(teacher_ids, token, offset, where, tables, edges)


@compiled_in_place
def _own_id(
    teacher_ids: NDArray[np.int32],
    token: int,
    offset: int,
    where: int,
    tables: Tables,
    edges: Edges,
) -> int:
    """Return the student token for the rest of the text's own teacher token."""
    if where == END:
        return edges.student_end
    token_id = teacher_ids[token]
    if offset == 0:
        own: int = tables.mapped[where, token_id]
        return own
    at, stop = tables.teacher_starts[token_id] + offset, tables.teacher_starts[token_id + 1]
    return find_prefix(tables.teacher_bytes[at:stop], tables)


@compiled_in_place
def _map_boundary(
    tables: Tables,
    table: int,
    expected: Entries,
    state: int,
    scratch: NDArray[np.uint16],
    out: LabelEntries,
    place: int,
) -> None:
    """Write the expectation after `state` for the label at `place`.

    Draws are written separately: added to entries, they could not be recognised.
    """
    count, num_tokens, total = 0, tables.mapped.shape[1], np.float32(0)
    for entry in range(expected.exact):
        teacher_id = expected.ids[state, entry]
        if teacher_id < 0:
            break
        if teacher_id < num_tokens and tables.mapped[table, teacher_id] >= 0:
            mass = expected.probs[state, entry]
            total += mass
            count = _add(out, place, count, tables.mapped[table, teacher_id], mass, scratch)
    # Quantised log-probabilities may add up to a little more than 1.
    _finish(out, place, count, max(total, np.float32(1)), scratch)
    for entry in range(expected.exact, expected.ids.shape[1]):
        teacher_id = expected.ids[state, entry]
        if 0 <= teacher_id < num_tokens and tables.mapped[table, teacher_id] >= 0:
            out.ids[place, entry] = tables.mapped[table, teacher_id]
            out.probs[place, entry] = expected.probs[state, entry]


@compiled_in_place
def _map_inside(
    prefix: tuple[int, int],
    expected: Entries,
    state: int,
    tables: Tables,
    scratch: NDArray[np.uint16],
    out: LabelEntries,
    place: int,
) -> None:
    """Write the expectation after `state`, given that it begins with some bytes of a teacher token.

    Draws are ignored: they are right on average, but not in a quotient.
    """
    width = prefix[1]
    at = tables.teacher_starts[prefix[0]]
    given = tables.teacher_bytes[at : at + width]
    count, extending, ending = 0, np.float32(0), np.float32(0)
    for entry in range(expected.exact):
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
        out.ids[place] = NONE
        out.probs[place] = 0


@compiled_in_place
def _add(
    out: LabelEntries,
    place: int,
    count: int,
    token_id: int,
    mass: float,
    scratch: NDArray[np.uint16],
) -> int:
    """Add mass to a token, whose slot `scratch` keeps; return the number of tokens."""
    slot = scratch[token_id]
    if slot != FREE:
        out.probs[place, slot] += mass
        return count
    scratch[token_id] = count
    out.ids[place, count], out.probs[place, count] = token_id, mass
    return count + 1


@compiled_in_place
def _finish(
    out: LabelEntries, place: int, count: int, whole: np.float32, scratch: NDArray[np.uint16]
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
