"""Loops over single tokens of whole batches, 10 to 30 times faster than numpy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges
from pipeline.compiled import compiled

SPACE = np.uint8(0x20)
WORD = np.uint64(8)
"""Bytes that `_load_word` reads: as many must follow the last one of a text."""
UNKNOWN = -2


@compiled
def offsets_from_vocabulary(
    input_ids: NDArray[np.uint32],
    cu_tokens: NDArray[np.int64],
    num_text_bytes: NDArray[np.int64],
    compared: NDArray[np.uint8],
    cu_compared: NDArray[np.int64],
    token_bytes: NDArray[np.uint8],
    cu_token_bytes: NDArray[np.int64],
    token_lengths: NDArray[np.int32],
    restarts: NDArray[np.bool_],
    byte_offsets: Ranges,
    proven: NDArray[np.bool_],
) -> None:
    """Lay each document's tokens side by side over its text and prove that they fit.

    A space put before the text (SentencePiece's dummy prefix, byte-level `add_prefix_space`) covers
    no byte; in compared documents one may also come after each token of `restarts` [V]. Without
    bytes to compare, lengths prove a document; 0 marks a token that no text may hold.
    `byte_offsets` [N, 2] and `proven` [D] are outputs.
    """
    prefix = 0  # of the document before: nearly always the same again
    for d in range(len(cu_tokens) - 1):
        ids = input_ids[cu_tokens[d] : cu_tokens[d + 1]]
        own = byte_offsets[cu_tokens[d] : cu_tokens[d + 1]]
        end = _lay_side_by_side(ids, token_lengths, -prefix, own)
        excess = end + prefix - num_text_bytes[d]
        fits = end != UNKNOWN and (excess == 0 or excess == 1)
        if fits and excess != prefix:
            prefix = excess
            _lay_side_by_side(ids, token_lengths, -prefix, own)
        if fits and prefix == 1:
            own[0, 0] = 0
            fits = token_bytes[cu_token_bytes[ids[0]]] == SPACE
        first, stop = cu_compared[d], cu_compared[d + 1]
        if fits and first < stop:
            fits = _spells(ids, compared, first, token_bytes, cu_token_bytes, prefix)
        if not fits and end != UNKNOWN and first < stop:
            text = compared[first : stop + int(WORD)]
            fits = _lay_after_restarts(
                ids, text, token_bytes, cu_token_bytes, token_lengths, restarts, own
            )
        if not fits:
            own[:] = 0
        proven[d] = fits


@compiled
def _lay_after_restarts(
    ids: NDArray[np.uint32],
    text: NDArray[np.uint8],
    token_bytes: NDArray[np.uint8],
    cu_token_bytes: NDArray[np.int64],
    token_lengths: NDArray[np.int32],
    restarts: NDArray[np.bool_],
    ranges: Ranges,
) -> bool:
    """Write the ranges of tokens that spell a text, which begins anew after each of `restarts`.

    A space put at such a place covers no byte. None of `restarts` begins with a space, so the next
    one, or the text's end, shows whether one was put. `WORD` bytes follow the text's last.
    """
    num_bytes = len(text) - int(WORD)
    position, first = 0, 0
    while first < len(ids):
        stop = first
        while stop < len(ids) and not restarts[ids[stop]]:
            stop += 1
        part = ids[first : min(stop + 1, len(ids))]
        own = ranges[first : first + len(part)]
        may_have_space = first < stop and token_bytes[cu_token_bytes[part[0]]] == SPACE
        fits = False
        for prefix in range(1 + may_have_space):
            end = _lay_side_by_side(part, token_lengths, position - prefix, own)
            fits = end == num_bytes if stop == len(ids) else end <= num_bytes
            fits = fits and _spells(part, text, position, token_bytes, cu_token_bytes, prefix)
            if fits:
                break
        if not fits:
            return False
        own[0, 0] = position
        position = end
        first += len(part)
    return position == num_bytes


@compiled
def _lay_side_by_side(
    ids: NDArray[np.uint32], token_lengths: NDArray[np.int32], start: int, ranges: Ranges
) -> int:
    """Write the tokens' ranges; return the last end, or `UNKNOWN`."""
    position, known = start, True
    for i in range(len(ids)):
        length = token_lengths[ids[i]] if ids[i] < len(token_lengths) else 0
        known &= length > 0
        ranges[i, 0] = position
        position += length
        ranges[i, 1] = position
    return position if known else UNKNOWN


@compiled
def _spells(
    input_ids: NDArray[np.uint32],
    text: NDArray[np.uint8],
    first_byte: int,
    token_bytes: NDArray[np.uint8],
    cu_token_bytes: NDArray[np.int64],
    prefix: int,
) -> bool:
    """Whether tokens' bytes, less `prefix` leading ones, equal as many from `first_byte` on.

    Comparing eight at once is three times as fast.
    """
    position = np.uintp(first_byte)
    for i in range(len(input_ids)):
        place = np.uintp(cu_token_bytes[input_ids[i]] + (prefix if i == 0 else 0))
        end = np.uintp(cu_token_bytes[input_ids[i] + 1])
        while place < end:
            count = min(end - place, WORD)
            difference = _load_word(token_bytes, place) ^ _load_word(text, position)
            if difference << np.uint64(8) * (WORD - count):
                return False
            place += count
            position += count
    return True


@compiled
def _load_word(data: NDArray[np.uint8], place: Any) -> Any:
    """Return eight bytes as a little-endian uint64; LLVM makes it one load."""
    word = np.uint64(0)
    for b in range(8):
        word |= np.uint64(data[place + np.uintp(b)]) << np.uint64(8 * b)
    return word


def flatten_bytes(texts: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Join byte strings, followed by `WORD` zeros; return the bytes and cu_text."""
    cu_text = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=cu_text[1:])
    return np.frombuffer(b"".join([*texts, bytes(int(WORD))]), np.uint8), cu_text
