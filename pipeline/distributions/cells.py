"""Cells: sets of student tokens that only the text can separate, counted on data.

A teacher that writes digit by digit expects "2" where the student's tokenizer writes "2015". Tokens
that replace each other form one *cell*, which gets the teacher's mass. A *rest* (what is left of
the teacher's token at a label's start) and the label belong together if they meet at least twice
and in more than 2 % of the cases of either; the rest also joins the token that gets its mass.

A token is *ruled out* after another if the data has what both spell as one token, at least twice,
and never has the two, or others of the second's cell, side by side. docs/concepts/distributions.md
has examples.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled_in_place
from pipeline.distributions.prefixes import Tables, find_divisions, find_prefixes
from pipeline.distributions.vocabulary_map import CellTables, VocabularyMap
from pipeline.distributions.walk import AMID, RowFields, find_starts

LEAST_COUNT = 2
LEAST_SHARE = 0.02
"""How often a pair must occur to join two cells: so often, and in this share of either's cases."""


class NoSharedStartError(ValueError):
    """No label of a sample starts where a teacher token's bytes are known."""


class Pairs(NamedTuple):
    """Rests and labels that start together, int64 [N] each.

    Attributes:
        rests: numbers, equal for equal bytes.
        targets: student tokens that get the rests' mass, -1 for none.
        inside: 1 if a rest isn't a whole token.
    """

    rests: NDArray[np.int64]
    labels: NDArray[np.int64]
    targets: NDArray[np.int64]
    inside: NDArray[np.int64]
    counts: NDArray[np.int64]


def count_cells(documents: Iterable[RowFields], vocabulary_map: VocabularyMap) -> CellTables:
    """Return cells, and what is ruled out after each token.

    Documents are rows of one segment, without tokens around them.

    Raises:
        NoSharedStartError: there is nothing to count.
    """
    documents = list(documents)
    num_tokens = len(vocabulary_map.tables.student_starts) - 1
    numbers = join_pairs(count_pairs(documents, vocabulary_map), num_tokens)
    return CellTables(numbers, _rule_out(documents, numbers, vocabulary_map.tables))


def count_pairs(documents: Iterable[RowFields], vocabulary_map: VocabularyMap) -> Pairs:
    """Count how often a teacher token's rest and a label start together."""
    codes, labels = _codes(documents, vocabulary_map)
    if not len(codes):
        raise NoSharedStartError(
            "no label of the sample starts at a byte that both tokenizers' tokens account for, so "
            "nothing shows which of their tokens stand for each other"
        )
    num_students = len(vocabulary_map.tables.student_starts) - 1
    pairs, counts = np.unique(codes * num_students + labels, return_counts=True)
    codes, labels = pairs // num_students, pairs % num_students
    inside = codes >= len(vocabulary_map.tables.teacher_starts) - 1
    rests, targets = _rests(codes, vocabulary_map)
    return Pairs(rests, labels, targets.astype(np.int64), inside.astype(np.int64), counts)


def join_pairs(pairs: Pairs, num_tokens: int) -> NDArray[np.int32]:
    """Return the cell of each of `num_tokens` student tokens."""
    order = np.lexsort((pairs.labels, pairs.rests))
    rests, labels, targets, _, counts = (each[order] for each in pairs)
    is_new = (np.diff(rests, prepend=-1) != 0) | (np.diff(labels, prepend=-1) != 0)
    firsts = np.flatnonzero(is_new)
    counts = np.add.reduceat(counts, firsts)
    rests, labels, targets = rests[firsts], labels[firsts], targets[firsts]
    of_rest, of_label = np.bincount(rests, counts), np.bincount(labels, counts)
    least = LEAST_SHARE * np.minimum(of_rest[rests], of_label[labels])
    joined = (counts >= LEAST_COUNT) & (counts > least) & (targets >= 0)
    cells = np.arange(num_tokens, dtype=np.int32)
    _join(targets[joined].astype(np.int32), labels[joined].astype(np.int32), cells)
    return cells


def largest_cells(cells: NDArray[np.int32], count: int) -> list[NDArray[np.int32]]:
    """Return the token ids of the `count` largest cells of several tokens."""
    sizes = np.bincount(cells)
    found = np.argsort(-sizes, kind="stable")[:count]
    return [np.flatnonzero(cells == cell).astype(np.int32) for cell in found if sizes[cell] > 1]


def describe_cell(tokens: Sequence[bytes]) -> str:
    """Describe a cell: the kind of its tokens, or the first of them.

    Example:
        >>> describe_cell([b"2", b"20", b" 201"])
        'digits, 3 tokens'
    """
    kinds = {
        "digits": lambda text: text.strip(b" ").isdigit(),
        "spaces": lambda text: not text.strip(b" "),
        "blanks": lambda text: not text.strip(),
        "signs": lambda text: not any(byte > 127 or chr(byte).isalnum() for byte in text),
    }
    for name, holds in kinds.items():
        if all(map(holds, tokens)):
            return f"{name}, {len(tokens):,} tokens"
    shown = [token.decode(errors="backslashreplace") for token in tokens[:3]]
    quoted = " ".join('"' + text.replace("\n", "\\n") + '"' for text in shown)
    return f"{quoted}{' …' if len(tokens) > 3 else ''}, {len(tokens):,} tokens"


def _rule_out(
    documents: Sequence[RowFields], numbers: NDArray[np.int32], tables: Tables
) -> NDArray[np.int64]:
    num_tokens = len(numbers)
    texts = [row.input_ids for row in documents]
    seen = np.bincount(np.concatenate(texts), minlength=num_tokens) >= LEAST_COUNT
    before, after = find_divisions(np.flatnonzero(seen), tables).astype(np.int64)
    beside = [ids[:-1] * np.int64(num_tokens) + numbers[ids[1:]] for ids in texts]
    is_seen = np.isin(before * num_tokens + numbers[after], np.concatenate(beside))
    return np.unique((before * num_tokens + after)[~is_seen])


def _codes(
    documents: Iterable[RowFields], vocabulary_map: VocabularyMap
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the teacher's rests, as offset * V_teacher + token id, and the labels."""
    tables, edges = vocabulary_map.tables, vocabulary_map.edges
    num_teachers = len(tables.teacher_starts) - 1
    codes, labels = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for row in documents:
        starts = find_starts(row, tables, edges)
        places = np.flatnonzero((starts.token >= 0) & (starts.where == AMID))
        own = row.teacher_input_ids[starts.token[places]].astype(np.int64)
        codes.append(starts.offset[places] * np.int64(num_teachers) + own)
        labels.append(row.input_ids[places + 1].astype(np.int64))
    return np.concatenate(codes), np.concatenate(labels)


def _rests(
    codes: NDArray[np.int64], vocabulary_map: VocabularyMap
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return a number for each rest's bytes, and the token that gets its mass."""
    tables = vocabulary_map.tables
    num_teachers = len(tables.teacher_starts) - 1
    found, place = np.unique(codes, return_inverse=True)
    tokens, offsets = found % num_teachers, found // num_teachers
    flat, bounds = tables.teacher_bytes.tobytes(), tables.teacher_starts
    texts = [
        flat[start + skip : stop]
        for start, skip, stop in zip(
            bounds[tokens].tolist(), offsets.tolist(), bounds[tokens + 1].tolist(), strict=True
        )
    ]
    numbers: dict[bytes, int] = {}
    own = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    to = find_prefixes(np.frombuffer(b"".join(texts), np.uint8), starts, tables)
    whole = offsets == 0  # some tokens with bytes are unmapped
    to[whole] = tables.mapped[AMID, tokens[whole]]
    return own[place], to[place]


@compiled_in_place
def _join(left: NDArray[np.int32], right: NDArray[np.int32], cells: NDArray[np.int32]) -> None:
    """Join each two tokens' cells; a cell's least token is its number."""
    for pair in range(len(left)):
        first, second = _root(cells, left[pair]), _root(cells, right[pair])
        cells[max(first, second)] = min(first, second)
    for token in range(len(cells)):
        cells[token] = _root(cells, token)


@compiled_in_place
def _root(cells: NDArray[np.int32], token: int) -> int:
    while cells[token] != token:
        cells[token] = cells[cells[token]]
        token = cells[token]
    return token
