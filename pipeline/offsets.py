"""Offsets as tokenizers report them, made exact: in bytes, overlaps and gaps mended.

What the reference libraries report is right for most tokens and wrong in known ways: the pieces of
one character all claim the whole character, SentencePiece's dummy prefix claims the first
character, and what a normaliser composed belongs to nobody. Reports are mended *cluster* by
cluster: a run of tokens whose reported ranges overlap or share a start.
"""

import unicodedata

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges


def byte_positions(text: str) -> NDArray[np.int64]:
    """Return the byte position of each character and of the end, int64 [len(text) + 1].

    Example:
        >>> byte_positions("aé").tolist()
        [0, 1, 3]
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def mend_offsets(
    reported: NDArray[np.int64],
    text: bytes,
    token_lengths: NDArray[np.int32],
    *,
    starts_with_space: NDArray[np.bool_],
    fill_gaps: bool = True,
) -> NDArray[np.int64]:
    """Return exact byte offsets from reported ones.

    - A gap that a normaliser left (combining marks, conjoining letters: no ASCII, no white space,
      no control characters) goes to the token before it, as the text it was composed into.
    - Tokens of a cluster whose lengths add up to it are laid side by side.
    - One byte too many, where the first token starts with a space, is a dummy prefix: it covers
      no byte.
    - Where lengths don't add up (a normaliser rewrote the bytes), tokens keep their overlapping
      ranges, empty ones cover the whole cluster: over-wide, never wrong.

    Args:
        reported: int64 [T, 2], byte ranges, none decreasing.
        text: the text's UTF-8 bytes.
        token_lengths: int32 [T], bytes that each token stands for; 0 where unknown.
        starts_with_space: bool [T], whether the first of them is a space.
        fill_gaps: whether a normaliser changed the text; else a gap is text that the vocabulary
            lacks, and belongs to no token.

    Returns:
        int64 [T, 2], byte ranges; tokens may overlap or leave text uncovered.

    Example:
        >>> reported, no_space = np.array([[0, 2], [0, 2]]), np.zeros(2, bool)
        >>> mend_offsets(reported, "é".encode(), np.array([1, 1]), starts_with_space=no_space)
        array([[0, 1],
               [1, 2]])
    """
    offsets = reported.copy()
    if len(offsets) == 0:
        return offsets
    new = (offsets[1:, 0] >= offsets[:-1, 1]) & (offsets[1:, 0] > offsets[:-1, 0])
    firsts = np.flatnonzero(np.concatenate([[True], new]))
    stops = np.append(firsts[1:], len(offsets))
    starts, ends = offsets[firsts, 0], offsets[stops - 1, 1]
    if fill_gaps:
        _fill_gaps(starts, ends, text)
    changed = (stops - firsts > 1) | (starts < offsets[firsts, 0]) | (ends > offsets[stops - 1, 1])
    for c in np.flatnonzero(changed).tolist():
        cluster = slice(firsts[c], stops[c])
        may_have_prefix = bool(starts_with_space[firsts[c]])
        _lay_out(offsets[cluster], starts[c], ends[c], token_lengths[cluster], may_have_prefix)
    return offsets


def kept_byte_offsets(
    text: bytes,
    lost_bytes: bytes,
    token_lengths: NDArray[np.int32],
    starts_with_space: NDArray[np.bool_],
) -> NDArray[np.int64] | None:
    """Return the offsets of tokens that spell a text less the bytes that a vocabulary lacks.

    `tokenizers` (0.23) counts those bytes out, so that every range behind one in a word is wrong.

    Args:
        text: the text's UTF-8 bytes, not normalised.
        lost_bytes: bytes that are left out.
        token_lengths: int32 [T], bytes that each token stands for.
        starts_with_space: bool [T], as in `mend_offsets`.

    Returns:
        int64 [T, 2], byte ranges; None where the lengths don't add up to the bytes kept.

    Example:
        >>> kept_byte_offsets(b"a_b", b"_", np.array([1, 1]), np.zeros(2, bool)).tolist()
        [[0, 1], [2, 3]]
    """
    kept = np.flatnonzero(~np.isin(np.frombuffer(text, np.uint8), list(lost_bytes)))
    surplus = int(token_lengths.sum()) - len(kept)
    prefixed = surplus == 1 and bool(starts_with_space[:1].any())
    if not token_lengths.all() or not (surplus == 0 or prefixed):
        return None
    ends = np.cumsum(token_lengths) - surplus
    starts = np.maximum(ends - token_lengths, 0)
    first_bytes = np.append(kept, len(text))[starts]
    last_bytes = np.append(kept, len(text))[ends - 1]
    return np.stack([first_bytes, np.where(ends > starts, last_bytes + 1, first_bytes)], axis=1)


def to_character_units(byte_offsets: Ranges, text: str) -> NDArray[np.int64]:
    """Return character ranges, int64 [T, 2], that cover the given byte ranges, as the paper counts.

    Example:
        >>> to_character_units(np.array([[0, 1], [1, 2], [2, 4]]), "é!").tolist()
        [[0, 1], [0, 1], [1, 2]]
    """
    starts = byte_positions(text)
    first = np.searchsorted(starts, byte_offsets[:, 0], side="right") - 1
    end = np.searchsorted(starts, byte_offsets[:, 1], side="left")
    empty = byte_offsets[:, 0] == byte_offsets[:, 1]
    return np.stack([first, np.where(empty, first, end)], axis=1).astype(np.int64)


def _lay_out(
    cluster: NDArray[np.int64],
    start: np.int64,
    end: np.int64,
    token_lengths: NDArray[np.int32],
    may_have_prefix: bool,
) -> None:
    """Write a cluster's ranges, in place, so that they cover `start` to `end`."""
    surplus = token_lengths.sum() - (end - start)
    adds_up = token_lengths.all() and (surplus == 0 or (surplus == 1 and may_have_prefix))
    if len(cluster) > 1 and adds_up:
        token_ends = start - surplus + np.cumsum(token_lengths)
        cluster[:, 1] = np.maximum(token_ends, start)
        cluster[:, 0] = np.maximum(token_ends - token_lengths, start)
        return
    if np.any(cluster[:, 0] == cluster[:, 1]):
        cluster[:] = (start, end)
    cluster[cluster[:, 1] == cluster[:, 1].max(), 1] = end
    cluster[cluster[:, 0] == cluster[0, 0], 0] = start


def _fill_gaps(starts: NDArray[np.int64], ends: NDArray[np.int64], text: bytes) -> None:
    """Move cluster bounds, in place, over the gaps that composing left behind them."""
    if _was_composed(text[: starts[0]]):
        starts[0] = 0
    next_starts = np.append(starts[1:], len(text))
    first_bytes = np.frombuffer(text + b"\0", np.uint8)[ends]
    for c in np.flatnonzero((ends < next_starts) & (first_bytes >= 0x80)).tolist():
        if _was_composed(text[ends[c] : next_starts[c]]):
            ends[c] = next_starts[c]


def _was_composed(gap: bytes) -> bool:
    characters = gap.decode("utf-8", errors="replace")
    return bool(characters) and not any(
        character.isascii() or character.isspace() or unicodedata.category(character)[0] == "C"
        for character in characters
    )
