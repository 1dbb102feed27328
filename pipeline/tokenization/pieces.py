"""Tokenize long texts in pieces: memory doesn't grow with the longest document.

Pieces overlap, and are joined where many tokens in a row agree. Otherwise the piece grows, up to a
limit; beyond it the document, such as one endless word, is refused.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges, TokenBatch
from schemas.document import tiles_text

Tokenize = Callable[[Sequence[bytes]], TokenBatch]

LONG_TEXT_BYTES = 512 << 10
"""Longer texts are tokenized in pieces if they take the reference path."""

PIECE_BYTES = 256 << 10
LONGEST_PIECE_BYTES = 4 << 20
"""A reference library takes about 160 bytes of memory for each byte of a piece."""

OVERLAP_BYTES = 8 << 10
AGREEING_TOKENS = 64
"""Tokens that must be the same on both sides of a joint. A tokenizer's choices reach back a few."""


def tokenize_in_pieces(text: bytes, tokenize: Tokenize) -> TokenBatch:
    """Tokenize one long UTF-8 text; its batch fails if pieces can't be joined."""
    start, size = 0, PIECE_BYTES
    ids: list[NDArray[np.uint32]] = []
    offsets: list[Ranges] = []
    piece = _tokenize_piece(text, start, size, tokenize)
    while not piece.failures and start + size < len(text):
        next_start = _next_start(text, start + size)
        following = _tokenize_piece(text, next_start, PIECE_BYTES, tokenize)
        joint = None if following.failures else _find_joint(piece, following, next_start)
        if joint is not None:
            ids.append(piece.input_ids[: joint[0]])
            offsets.append(piece.byte_offsets[: joint[0]])
            piece, start, size = _slice(following, joint[1]), next_start, PIECE_BYTES
        elif following.failures or size >= LONGEST_PIECE_BYTES:
            return _failure(text, next_start, following)
        else:  # `piece` is settled before `start`: only its end is extended
            size += size
            longer = _tokenize_piece(text, start, size, tokenize)
            piece = longer if not ids else _from_first_of(piece, longer)
    if piece.failures:
        return _failure(text, start, piece)
    input_ids = np.concatenate([*ids, piece.input_ids])
    byte_offsets = np.concatenate([*offsets, piece.byte_offsets])
    tiles = np.array([tiles_text(byte_offsets, len(text))], np.bool_)
    cu_tokens = np.array([0, len(input_ids)], np.int64)
    return TokenBatch(input_ids, byte_offsets, cu_tokens, tiles)


def group_texts(texts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield groups of at most `LONG_TEXT_BYTES`; a longer text is alone."""
    first = num_bytes = 0
    for d, text in enumerate(texts):
        if d > first and num_bytes + len(text) > LONG_TEXT_BYTES:
            yield texts[first:d]
            first, num_bytes = d, 0
        num_bytes += len(text)
    if texts:
        yield texts[first:]


def start_of(text: bytes, most: int) -> bytes:
    """Cut a UTF-8 text to at most `most` bytes, between characters.

    Example:
        >>> start_of("né".encode(), 2)
        b'n'
    """
    return text[: character_start(text, most)]


def character_start(text: bytes, place: int) -> int:
    """Return the last character start at or before a place."""
    place = min(place, len(text))
    while 0 < place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _tokenize_piece(text: bytes, start: int, size: int, tokenize: Tokenize) -> TokenBatch:
    batch = tokenize([text[start : character_start(text, start + size)]])
    batch.byte_offsets[:] += start
    return batch


def _next_start(text: bytes, end: int) -> int:
    first = end - OVERLAP_BYTES
    found = text.find(b"\n", first, end - OVERLAP_BYTES // 2)
    if found < 0:
        found = text.find(b" ", first, end - OVERLAP_BYTES // 2)
    return found if found >= 0 else character_start(text, first)


def _find_joint(before: TokenBatch, after: TokenBatch, start: int) -> tuple[int, int] | None:
    """Return tokens of both pieces that begin at one byte, amid equal tokens."""
    first = int(np.searchsorted(before.byte_offsets[:, 0], start))
    wanted = 2 * AGREEING_TOKENS
    starts = after.byte_offsets[:, 0]
    for i in range(first, len(before.input_ids) - wanted, AGREEING_TOKENS // 2):
        j = int(np.searchsorted(starts, before.byte_offsets[i, 0]))
        if _agree(before, i, after, j, wanted):
            middle = _boundary(before, i, wanted)
            if middle is not None:
                return middle, j + middle - i
    return None


def _agree(before: TokenBatch, i: int, after: TokenBatch, j: int, count: int) -> bool:
    own, others = slice(i, i + count), slice(j, j + count)
    return np.array_equal(before.input_ids[own], after.input_ids[others]) and np.array_equal(
        before.byte_offsets[own], after.byte_offsets[others]
    )


def _boundary(tokens: TokenBatch, first: int, count: int) -> int | None:
    """Return a token near the middle that shares no byte with its predecessor."""
    for place in range(first + count // 2, first + count):
        if tokens.byte_offsets[place, 0] >= tokens.byte_offsets[place - 1, 1]:
            return place
    return None


def _from_first_of(piece: TokenBatch, longer: TokenBatch) -> TokenBatch:
    return _slice(longer, int(np.searchsorted(longer.byte_offsets[:, 0], piece.byte_offsets[0, 0])))


def _slice(batch: TokenBatch, first: int) -> TokenBatch:
    ids, offsets = batch.input_ids[first:], batch.byte_offsets[first:]
    cu_tokens = np.array([0, len(ids)], np.int64)
    return TokenBatch(ids, offsets, cu_tokens, np.zeros(1, np.bool_), batch.failures)


def _failure(text: bytes, place: int, piece: TokenBatch) -> TokenBatch:
    reason = piece.failures.get(
        0,
        f"{len(text)} bytes of text that a tokenizer can't take in pieces: around byte {place} "
        f"none of {LONGEST_PIECE_BYTES} bytes is a place where it starts anew; split the document",
    )
    return TokenBatch(
        np.empty(0, np.uint32),
        np.empty((0, 2), np.int32),
        np.zeros(2, np.int64),
        np.zeros(1, np.bool_),
        {0: reason},
    )
