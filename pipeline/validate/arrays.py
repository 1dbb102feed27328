"""Rules about tokens, checked over whole batches.

Functions yield each offending document, with a message on its first offence and their number.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment import align_tokens
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument, Tokens
from schemas.index import ShardIndex

Problems = Iterator[tuple[int, str]]


class CutPoints(NamedTuple):
    """Cut points as in `ShardIndex`: int64 [D + 1], [C] and [C]."""

    starts: NDArray[np.int64]
    student: NDArray[np.int64]
    teacher: NDArray[np.int64]


def stack_documents(documents: Sequence[AlignedDocument]) -> AlignedBatch:
    """Join decoded documents, with their kept texts."""
    return AlignedBatch(
        documents=[SourceDocument(d.document_id, d.text or b"") for d in documents],
        student=_stack_tokens([document.student for document in documents]),
        teacher=_stack_tokens([document.teacher for document in documents]),
        teacher_spans=np.concatenate(
            [np.empty((0, 2), np.int64), *(document.teacher_spans for document in documents)]
        ),
    )


def stack_cuts(index: ShardIndex, rows: Sequence[int]) -> CutPoints:
    """Return some rows' cut points."""
    own = [np.arange(*index.cut_starts[row : row + 2]) for row in rows]
    places = np.concatenate([np.empty(0, np.int64), *own])
    starts = np.cumsum([0, *map(len, own)], dtype=np.int64)
    student, teacher = index.cut_student[places], index.cut_teacher[places]
    return CutPoints(starts, student.astype(np.int64), teacher.astype(np.int64))


def find_unknown_ids(tokens: TokenBatch, vocab_size: int) -> Problems:
    """Find ids outside the vocabulary."""
    for d, i, more in _first_per_document(tokens.input_ids >= vocab_size, tokens.cu_tokens):
        token_id = tokens.input_ids[tokens.cu_tokens[d] + i]
        yield d, f"token {i} has id {token_id}, the vocabulary {vocab_size}{more}"


def find_unsound_offsets(
    tokens: TokenBatch, num_text_bytes: NDArray[np.int64], must_tile: NDArray[np.bool_]
) -> Problems:
    """Find offsets that decrease, or fail to cover a text that must be covered.

    `num_text_bytes` is int64 [D], `must_tile` bool [D].
    """
    offsets, cu_tokens = tokens.byte_offsets, tokens.cu_tokens
    starts, ends = offsets[:, 0], offsets[:, 1]
    wrong = np.asarray(ends < starts)
    backwards = np.asarray((starts[1:] < starts[:-1]) | (ends[1:] < ends[:-1]))
    firsts = cu_tokens[(cu_tokens > 0) & (cu_tokens < len(offsets))]
    backwards[firsts - 1] = False
    wrong[1:] |= backwards
    for d, i, more in _first_per_document(wrong, cu_tokens):
        covered = _range(offsets[cu_tokens[d] + i])
        yield d, f"token {i} covers bytes {covered}, before its predecessor{more}"
    padded = np.concatenate([np.zeros(1, np.int64), offsets[:, 1]])
    covers = np.where(np.diff(cu_tokens) > 0, padded[cu_tokens[1:]], 0)
    for d in np.flatnonzero(must_tile & (covers != num_text_bytes)).tolist():
        yield d, f"tokens cover {covers[d]} of {num_text_bytes[d]} bytes of text"


def find_wrong_spans(batch: AlignedBatch) -> Problems:
    """Find teacher_spans that the stored offsets don't give."""
    recomputed = align_tokens(batch.student, batch.teacher)
    cu_tokens = batch.student.cu_tokens
    wrong = (batch.teacher_spans != recomputed).any(axis=1)
    for d, i, more in _first_per_document(wrong, cu_tokens):
        stored = _range(batch.teacher_spans[cu_tokens[d] + i])
        expected = _range(recomputed[cu_tokens[d] + i])
        yield d, f"student token {i} has {stored}, its offsets give {expected}{more}"


def find_wrong_cuts(batch: AlignedBatch, cuts: CutPoints) -> Problems:
    """Find cut points that are out of order or divide a token."""
    student, teacher = batch.student, batch.teacher
    owners = np.repeat(np.arange(student.num_documents), np.diff(cuts.starts))
    same_document = owners[1:] == owners[:-1]
    wrong = np.zeros(len(owners), np.bool_)
    backwards = (cuts.student[1:] <= cuts.student[:-1]) | (cuts.teacher[1:] < cuts.teacher[:-1])
    wrong[1:] = same_document & backwards
    for places, tokens in ((cuts.student, student), (cuts.teacher, teacher)):
        # Each part must have a token.
        wrong |= (places < 1) | (places >= np.diff(tokens.cu_tokens)[owners])
    inside = np.flatnonzero(~wrong)
    i = cuts.student[inside] + student.cu_tokens[owners[inside]]
    j = cuts.teacher[inside] + teacher.cu_tokens[owners[inside]]
    ends = np.maximum(student.byte_offsets[i - 1, 1], teacher.byte_offsets[j - 1, 1])
    wrong[inside] = ends > np.minimum(student.byte_offsets[i, 0], teacher.byte_offsets[j, 0])
    for d, n, more in _first_per_document(wrong, cuts.starts):
        place = cuts.starts[d] + n
        pair = f"student token {cuts.student[place]} and teacher token {cuts.teacher[place]}"
        yield d, f"the cut before {pair} divides a token or is out of order{more}"


def find_other_tokens(tokens: TokenBatch, fresh: TokenBatch) -> Problems:
    """Find tokens that differ from a fresh tokenization."""
    arrays = ("cu_tokens", "input_ids", "byte_offsets")
    same = all(np.array_equal(getattr(tokens, name), getattr(fresh, name)) for name in arrays)
    if same and not fresh.failures:
        return  # nearly always
    for d in range(tokens.num_documents):
        if d in fresh.failures:
            yield d, f"the text can't be tokenized: {fresh.failures[d]}"
            continue
        stored, expected = (_flatten(batch, d) for batch in (tokens, fresh))
        common = min(len(stored), len(expected))
        differ = (stored[:common] != expected[:common]).any(axis=1)
        if differ.any():
            i = int(np.argmax(differ))
            found, given = (f"id {t[0]} over {_range(t[1:])}" for t in (stored[i], expected[i]))
            yield d, f"token {i} is {found}, the text gives {given}"
        elif len(stored) != len(expected):
            yield d, f"{len(stored)} tokens, the text gives {len(expected)}"


def find_foreign_content(
    tokens: TokenBatch, texts: Sequence[bytes], tokenizer: Tokenizer
) -> Problems:
    """Find tokens whose range doesn't hold their bytes; a fresh tokenization may repeat this."""
    for d, text in enumerate(texts):
        own = slice(tokens.cu_tokens[d], tokens.cu_tokens[d + 1])
        ids, byte_offsets = tokens.input_ids[own], tokens.byte_offsets[own]
        unproven = tokenizer.find_unproven(ids, byte_offsets, text)
        if unproven:
            i = unproven[0]
            more = f" (first of {len(unproven)})" if len(unproven) > 1 else ""
            what = f"token {i}, id {ids[i]}, does not stand for bytes {_range(byte_offsets[i])}"
            yield d, f"{what} of the text{more}"


def _stack_tokens(documents: Sequence[Tokens]) -> TokenBatch:
    cu_tokens = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(tokens) for tokens in documents], out=cu_tokens[1:])
    ids = np.concatenate([np.empty(0, np.int64), *(tokens.input_ids for tokens in documents)])
    offsets = [tokens.byte_offsets for tokens in documents]
    return TokenBatch(
        input_ids=ids.astype(np.uint32),
        byte_offsets=np.concatenate([np.empty((0, 2), np.int64), *offsets]),
        cu_tokens=cu_tokens,
        tiles=np.zeros(len(documents), np.bool_),
    )


def _first_per_document(
    wrong: NDArray[np.bool_], cu_tokens: NDArray[np.int64]
) -> list[tuple[int, int, str]]:
    """Return offending documents, first wrong tokens and notes on the others."""
    tokens = np.flatnonzero(wrong)
    documents = np.searchsorted(cu_tokens, tokens, side="right") - 1
    found, firsts, counts = np.unique(documents, return_index=True, return_counts=True)
    positions = (tokens[firsts] - cu_tokens[found]).tolist()
    notes = [f" (first of {count})" if count > 1 else "" for count in counts.tolist()]
    return list(zip(found.tolist(), positions, notes, strict=True))


def _flatten(tokens: TokenBatch, document: int) -> NDArray[np.int64]:
    """Return a document's ids, starts and ends, int64 [T, 3]."""
    own = slice(*tokens.cu_tokens[document : document + 2])
    return np.column_stack([tokens.input_ids[own].astype(np.int64), tokens.byte_offsets[own]])


def _range(pair: NDArray[np.int64]) -> str:
    return f"{pair[0]}:{pair[1]}"
