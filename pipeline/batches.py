"""Documents in batches: flat arrays over many documents.

All tokens of D documents are in one array; document d owns `cu_tokens[d]:cu_tokens[d + 1]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TEXT_BYTES = 2**31 - 1
"""The longest text whose offsets fit int32."""

Ranges = NDArray[np.signedinteger[Any]]
"""Half-open ranges [N, 2]: int32 from tokenizers and alignment, because int64 would move twice the
memory; int64 in decoded samples."""


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """One text to align.

    Attributes:
        document_id: unique in the dataset.
        text: UTF-8.
        metadata: a value for each of the shard's columns; None if missing.
    """

    document_id: str
    text: bytes
    metadata: tuple[str | int | float | bool | None, ...] = ()


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One tokenizer's tokens of D documents, N in all.

    Attributes:
        input_ids: uint32 [N].
        byte_offsets: int32 [N, 2], half-open byte ranges in each token's document.
        cu_tokens: int64 [D + 1].
        tiles: bool [D], whether tokens cover the text without gap or overlap; alignment trusts it.
        failures: why a document has no tokens, by its place.
    """

    input_ids: NDArray[np.uint32]
    byte_offsets: Ranges
    cu_tokens: NDArray[np.int64]
    tiles: NDArray[np.bool_]
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        """Documents, failed ones included."""
        return len(self.cu_tokens) - 1


class PerDocument(NamedTuple):
    """Values of each document: document d has `values[cu[d]:cu[d + 1]]`; `cu` is int64 [D + 1]."""

    values: NDArray[Any]
    cu: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RenderedSide:
    """One side's renderings of chats, as samples store them.

    Attributes:
        own_text: uint8 [C], the templates' bytes.
        pieces: int64 [P, 3], bytes of own text, then the document's range after them.
        learned: int64 [L, 2], ranges of tokens: the student's labels, or the teacher's that cover a
            learned byte.
    """

    own_text: PerDocument
    pieces: PerDocument
    learned: PerDocument


@dataclass(frozen=True, eq=False)
class ChatParts:
    """Parts that only chats have.

    Attributes:
        messages: uint8 [B], JSON of their messages, without texts.
        learned: int64 [R, 2], learned ranges of the document's bytes.
        turns: int64 [C, 2], student and teacher token before which a turn ends.
        num_control_strings: int64 [D], control tokens' strings in their texts.
        num_seams: int64 [D], learned student tokens across a text and the template.
        num_lone_seams: int64 [D], those for which no teacher token shares both.
    """

    messages: PerDocument
    learned: PerDocument
    student: RenderedSide
    teacher: RenderedSide
    turns: PerDocument
    num_control_strings: NDArray[np.int64]
    num_seams: NDArray[np.int64]
    num_lone_seams: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AlignedBatch:
    """D `documents`, tokenized for `student` and `teacher` and aligned, without failed ones.

    Attributes:
        teacher_spans: int32 [N_student, 2], half-open ranges of teacher tokens within each
            document; start == end means unmapped.
        failures: documents that could not be aligned, with the reason.
        chats: chats' parts; None for texts.
        refused: chats that a template refuses, or whose texts its rendering lacks.
    """

    documents: Sequence[SourceDocument]
    student: TokenBatch
    teacher: TokenBatch
    teacher_spans: Ranges
    failures: Sequence[tuple[SourceDocument, str]] = ()
    chats: ChatParts | None = None
    refused: Sequence[tuple[SourceDocument, str]] = ()


def join_batches(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Join batches into one."""
    if len(batches) == 1:
        return batches[0]
    firsts = np.cumsum([0, *(batch.num_documents for batch in batches)]).tolist()
    counts = [np.diff(batch.cu_tokens) for batch in batches]
    return TokenBatch(
        input_ids=np.concatenate([np.empty(0, np.uint32), *(b.input_ids for b in batches)]),
        byte_offsets=np.concatenate(
            [np.empty((0, 2), np.int32), *(batch.byte_offsets for batch in batches)]
        ),
        cu_tokens=np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64),
        tiles=np.concatenate([np.empty(0, np.bool_), *(batch.tiles for batch in batches)]),
        failures={
            first + document: reason
            for first, batch in zip(firsts[:-1], batches, strict=True)
            for document, reason in batch.failures.items()
        },
    )


def splice_documents(
    batch: TokenBatch, documents: NDArray[np.int64], other: TokenBatch
) -> TokenBatch:
    """Replace some documents' tokens by another batch's."""
    place = {int(document): row for row, document in enumerate(documents)}
    parts: list[tuple[TokenBatch, int]] = [
        (other, place[d]) if d in place else (batch, d) for d in range(batch.num_documents)
    ]
    cuts = [slice(source.cu_tokens[d], source.cu_tokens[d + 1]) for source, d in parts]
    counts = [cut.stop - cut.start for cut in cuts]
    return TokenBatch(
        input_ids=np.concatenate([s.input_ids[c] for (s, _), c in zip(parts, cuts, strict=True)]),
        byte_offsets=np.concatenate(
            [s.byte_offsets[c] for (s, _), c in zip(parts, cuts, strict=True)]
        ),
        cu_tokens=np.cumsum([0, *counts], dtype=np.int64),
        tiles=np.array([source.tiles[d] for source, d in parts], np.bool_),
        failures={int(documents[row]): reason for row, reason in other.failures.items()},
    )


def without_failures(batch: TokenBatch) -> TokenBatch:
    """Drop the tokens of failed documents."""
    counts = np.diff(batch.cu_tokens)
    kept = np.ones(batch.num_documents, bool)
    kept[list(batch.failures)] = False
    tokens = np.repeat(kept, counts)
    return TokenBatch(
        input_ids=batch.input_ids[tokens],
        byte_offsets=batch.byte_offsets[tokens],
        cu_tokens=np.concatenate([[0], np.cumsum(np.where(kept, counts, 0))]).astype(np.int64),
        tiles=batch.tiles & kept,
        failures=batch.failures,
    )


def find_unusable(texts: Sequence[bytes]) -> dict[int, str]:
    """Return why texts can't be tokenized (too long, not UTF-8), by place."""
    failures: dict[int, str] = {}
    for document, text in enumerate(texts):
        if len(text) > MAX_TEXT_BYTES:
            failures[document] = f"{len(text)} bytes of text, more than {MAX_TEXT_BYTES}: split it"
        elif not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                failures[document] = f"not valid UTF-8 at byte {error.start}"
    return failures
