"""Find where a student's labels start among a teacher's tokens, byte by byte."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled_in_place
from pipeline.distributions.prefixes import NONE, Tables

AMID, START, END = 0, 1, 2
"""Where a label is: the first two are rows of `Tables.mapped`, the third is a document's end."""


class Edges(NamedTuple):
    """Tokens and spaces around texts; -1 is no token.

    Attributes:
        student_context: ids before a segment that starts or continues a document.
        student_end: id after a document.
        student_skip: 1 if only the student's tokens begin with a space that isn't in the text.
        always_skips: whether that is independent of the text.
        of_chats: whether labels without a teacher token, a template's, divide texts.
    """

    student_context: tuple[int, int]
    student_end: int
    teacher_context: tuple[int, int]
    teacher_end: int
    student_skip: int
    teacher_skip: int
    always_skips: bool
    of_chats: bool = False


class RowFields(NamedTuple):
    """Fields of one row, as in `pipeline.streaming.Rows`; `teacher_losses` are always present."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]
    teacher_spans: NDArray[np.int32]
    teacher_input_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    teacher_cu_seqlens: NDArray[np.int32]
    teacher_losses: NDArray[np.float32]


class LabelStarts(NamedTuple):
    """Where the label at each place of a row starts, [S] each.

    Attributes:
        token: the teacher token's place; -1: unknown, or the label doesn't count.
        offset: its bytes before the label.
        where: AMID a text, at its START, or at its END, with `token` one past the last.
    """

    token: NDArray[np.int32]
    offset: NDArray[np.int32]
    where: NDArray[np.int32]


def find_starts(row: RowFields, tables: Tables, edges: Edges) -> LabelStarts:
    """Find where each label of a row starts among the teacher's tokens."""
    starts = LabelStarts(*np.empty((3, len(row.input_ids)), np.int32))
    _find_starts(row, tables, edges, starts)
    return starts


@compiled_in_place
def _find_starts(row: RowFields, tables: Tables, edges: Edges, out: LabelStarts) -> None:
    out.token[:] = NONE
    for segment in range(len(row.cu_seqlens) - 1):
        _walk_segment(row, segment, tables, edges, out)


@compiled_in_place
def _walk_segment(
    row: RowFields, segment: int, tables: Tables, edges: Edges, out: LabelStarts
) -> None:
    """Walk over a segment's student and teacher tokens side by side, byte by byte.

    The walk is at byte `offset` of teacher token `token`. Spans that start both sides' tokens
    together are trusted: if the walk arrived elsewhere, results since `anchor`, the last such
    place, are withdrawn. So a segment cut inside a teacher token gives no wrong results.
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
    last = end - 1
    for at in range(first, end):
        place, label = at - 1, row.input_ids[at]
        span, stop = NONE, NONE
        if place >= start:
            span, stop = row.teacher_spans[place, 0], row.teacher_spans[place, 1]
        if at == end - 1 and label == edges.student_end and span == stop >= 0:
            last = place
            if row.loss_mask[place] > 0 and t_end > t_start:
                _write(out, place, t_end, 0, END)
            break
        if edges.of_chats and place >= start:
            if span == stop:  # results up to the text's end hold if the walk is there
                if known and (offset > 0 or token != before):
                    _take_back(out, anchor, place)
                known, before = False, NONE
                continue
            if before == NONE:  # a text begins: its bytes show whether a teacher token does, too
                known, confirmed, token, offset, anchor = True, True, span, 0, place
        here = known and (place < start or (span == token and (offset > 0 or before == NONE)))
        if before >= 0 and span == before < stop:
            here = known and token == span and offset == 0
            if known and not here:
                _take_back(out, anchor, place)
            known, confirmed, token, offset, anchor, here = True, True, span, 0, place, True
        where, found = AMID, (NONE, 0)
        if here:
            found = _advance(row, label, 0, token, offset, t_end, tables)
            if at == first and edges.student_skip + edges.teacher_skip:
                where, found = _start_of_text(row, label, token, found, t_end, tables, edges)
        if found[0] == NONE or (place >= start and stop != found[0] + (found[1] > 0)):
            if known:
                _take_back(out, anchor, place)
            known = False
        elif place >= start and token > t_start and row.loss_mask[place] > 0 and where != NONE:
            _write(out, place, token, offset, where)
        before = stop if span < stop else NONE
        token, offset = found
    if not confirmed:
        _take_back(out, start, last)


@compiled_in_place
def _write(out: LabelStarts, place: int, token: int, offset: int, where: int) -> None:
    out.token[place], out.offset[place], out.where[place] = token, offset, where


@compiled_in_place
def _take_back(out: LabelStarts, start: int, stop: int) -> None:
    for place in range(start, stop):
        out.token[place] = NONE


@compiled_in_place
def _is_context(token_id: int, context: tuple[int, int]) -> int:
    return 1 if token_id >= 0 and (token_id == context[0] or token_id == context[1]) else 0


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
    """Return the table for a segment's first label, -1 for none, and where the walk continues.

    If only one tokenizer puts a space before a text, whichever fits is taken, as the segment may
    continue its document.
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
