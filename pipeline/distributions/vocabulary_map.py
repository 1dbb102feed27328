"""Tables of the student token that each teacher token begins with, made once per pair."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.distributions.prefixes import NONE, Tables, find_prefixes, insert_entries
from pipeline.distributions.walk import Edges
from schemas.manifest import ConventionRecord

if TYPE_CHECKING:  # rows are read without tokenizer libraries
    from pipeline.tokenization import Tokenizer

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_NEUTRAL = b"a"
"""Put around a token to see whether a normaliser keeps it: it may drop white space at the ends."""


class CellTables(NamedTuple):
    """Cells and ruled-out tokens (`pipeline.distributions.cells`).

    Attributes:
        numbers: int32 [V], each token's cell: its least token id.
        ruled_out: int64 [N], ascending: before * V + token, for tokens that don't come after
            another.
    """

    numbers: NDArray[np.int32]
    ruled_out: NDArray[np.int64]

    @property
    def digest(self) -> str:
        """64 hex digits over both."""
        parts = self.numbers.astype("<i4"), self.ruled_out.astype("<i8")
        return sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    @classmethod
    def unjoined(cls, num_tokens: int) -> CellTables:
        """Make each token its own cell, and rule nothing out."""
        return cls(np.arange(num_tokens, dtype=np.int32), np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """How a teacher's tokens are read in a student's vocabulary.

    The teacher's end token goes to the student's; other special tokens, and ones that the student's
    normaliser would rewrite, go nowhere.

    Attributes:
        tables: for the kernels; `tables.mapped` has the student's id for each of the teacher's, -1
            for none, amid a text and at its start, where a tokenizer may put a space.
        edges: tokens and spaces around texts.
        cells: None if not counted.
    """

    tables: Tables
    edges: Edges
    cells: CellTables | None = None

    @classmethod
    def of(
        cls,
        student: Tokenizer,
        teacher: Tokenizer,
        *,
        student_convention: ConventionRecord | None = None,
        teacher_convention: ConventionRecord | None = None,
        of_chats: bool = False,
    ) -> VocabularyMap:
        """Make the tables for tokens around texts (default: the tokenizers' own).

        Rows of chats hold several texts, with a template's between them.

        Raises:
            ValueError: tokens don't spell a text (WordPiece).
        """
        own = student_convention or student.around_text
        other = teacher_convention or teacher.around_text
        student_bytes, student_starts = _flatten(_entries(student))
        texts = _entries(teacher)
        texts = [text if student.keeps_text(_NEUTRAL + text + _NEUTRAL) else b"" for text in texts]
        student_spaces, teacher_spaces = _Spaces.of(student), _Spaces.of(teacher)
        teacher_bytes, teacher_starts = _flatten(texts)
        tables = Tables(
            mapped=np.full((2, len(texts)), NONE, np.int32),
            student_bytes=student_bytes,
            student_starts=student_starts,
            teacher_bytes=teacher_bytes,
            teacher_starts=teacher_starts,
            slots=_hash_entries(student, student_bytes, student_starts),
        )
        at_start = _flatten(_at_start(texts, student_spaces, teacher_spaces))
        tables.mapped[0] = find_prefixes(teacher_bytes, teacher_starts, tables)
        tables.mapped[1] = find_prefixes(*at_start, tables)
        end = NONE if own.end_token_id is None else own.end_token_id
        for token_id in {teacher.eos_token_id, other.end_token_id} - {None}:
            tables.mapped[:, token_id] = end
        differ = student_spaces.before_word != teacher_spaces.before_word
        edges = Edges(
            student_context=_context(own),
            student_end=end,
            teacher_context=_context(other),
            teacher_end=NONE if other.end_token_id is None else other.end_token_id,
            student_skip=int(differ and student_spaces.before_word),
            teacher_skip=int(differ and teacher_spaces.before_word),
            always_skips=student_spaces.always and teacher_spaces.always,
            of_chats=of_chats,
        )
        return cls(tables, edges)


class _Spaces(NamedTuple):
    """When a tokenizer puts a space before a text.

    Attributes:
        before_word: before one that begins with a letter.
        always: the same before one that begins with a space.
    """

    before_word: bool
    always: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Spaces:
        batch = tokenizer.tokenize_batch([_NEUTRAL, b" " + _NEUTRAL])
        word, spaced = (
            b"".join(map(tokenizer.token_bytes, batch.input_ids[start:stop].tolist()))
            for start, stop in zip(batch.cu_tokens, batch.cu_tokens[1:], strict=False)
        )
        before_word = word == b" " + _NEUTRAL
        return cls(before_word, (spaced == b"  " + _NEUTRAL) == before_word)


def _entries(tokenizer: Tokenizer) -> list[bytes]:
    entries = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    if not any(entries):
        raise ValueError(
            f'the tokens of tokenizer "{tokenizer.source}" don\'t spell a text (WordPiece or '
            "another lossy model), so nothing says which bytes a distribution is over: use stored "
            "losses without distributions"
        )
    return entries


def _flatten(entries: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    starts = np.cumsum([0, *map(len, entries)], dtype=np.int64)
    return np.frombuffer(b"".join(entries), np.uint8), starts


def _hash_entries(
    tokenizer: Tokenizer, flat: NDArray[np.uint8], starts: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return ids by the hash of their bytes; of equal ones the tokenizer's."""
    names = filter(_BYTE_PIECE.fullmatch, tokenizer.base_vocabulary())
    # A byte's own token is only given if no piece spells it, and a piece if no added token does.
    fallback = {tokenizer.find_token(name) for name in names}
    added = set(tokenizer.named_tokens.values())
    known = np.flatnonzero(np.diff(starts)).tolist()
    order = np.array(sorted(known, key=lambda i: (i in fallback, i not in added, i)), np.int32)
    slots = np.full(1 << (2 * len(order)).bit_length(), NONE, np.int32)
    insert_entries(order, flat, starts, slots)
    return slots


def _at_start(texts: Sequence[bytes], student: _Spaces, teacher: _Spaces) -> list[bytes]:
    """Return how a student spells a teacher's first tokens."""
    if student.before_word == teacher.before_word:
        return list(texts)
    if teacher.before_word:  # one without a space can't be the first
        return [text[1:] if text.startswith(b" ") else b"" for text in texts]
    spaced = student.always
    return [
        b" " + text if text and (spaced or not text.startswith(b" ")) else text for text in texts
    ]


def _context(convention: ConventionRecord) -> tuple[int, int]:
    first, continued = convention.first_token_id, convention.continued_token_id
    return (NONE if first is None else first, NONE if continued is None else continued)
