"""Offsets as tokenizers report them, made exact: from characters to bytes, overlaps and gaps mended.

What the reference libraries report is right for most tokens and wrong in known ways: the pieces of
one character all claim the whole character, SentencePiece's dummy prefix claims the first
character, and what a normaliser composed belongs to nobody. Reports are mended *cluster* by
cluster: a run of tokens whose reported ranges overlap or share a start.
"""

import unicodedata

import numpy as np
from numpy.typing import NDArray


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
    reported: NDArray[np.int64], text: bytes, token_lengths: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return exact byte offsets from reported ones.

    - A gap that a normaliser left (combining marks, conjoining letters: anything but white space
      and control characters) goes to the token before it, as the text it was composed into.
    - Tokens of a cluster whose lengths add up to it are laid side by side.
    - One byte too many at the start of the text is a dummy prefix: it covers no byte.
    - Where lengths don't add up (a normaliser rewrote the bytes), tokens keep their overlapping
      ranges, empty ones cover the whole cluster: over-wide, never wrong.

    Args:
        reported: int64 [T, 2], byte ranges, none decreasing.
        text: the text's UTF-8 bytes.
        token_lengths: int32 [T], bytes that each token stands for; 0 where unknown.

    Returns:
        int64 [T, 2], byte ranges; tokens may overlap or leave white space uncovered.
    """
    offsets = reported.copy()
    clusters = _clusters(offsets)
    ranges = [(int(offsets[a, 0]), int(offsets[a:b, 1].max())) for a, b in clusters]
    for (first, last), (start, end) in zip(clusters, _fill_gaps(ranges, text), strict=True):
        lengths = token_lengths[first:last].astype(np.int64)
        surplus = int(lengths.sum()) - (end - start)
        adds_up = lengths.all() and (surplus == 0 or (surplus == 1 and start == 0))
        if last - first > 1 and adds_up:
            ends = start - surplus + np.cumsum(lengths)
            offsets[first:last, 1] = np.maximum(ends, start)
            offsets[first:last, 0] = np.maximum(ends - lengths, start)
        else:
            _widen(offsets[first:last], start, end)
    return offsets


def to_character_units(byte_offsets: NDArray[np.int64], text: str) -> NDArray[np.int64]:
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


def _clusters(offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
    clusters: list[tuple[int, int]] = []
    first, end = 0, -1
    for i, (a, b) in enumerate(offsets.tolist()):
        if i > first and a >= end and a > offsets[i - 1, 0]:
            clusters.append((first, i))
            first, end = i, b
        end = max(end, b)
    if len(offsets):
        clusters.append((first, len(offsets)))
    return clusters


def _widen(cluster: NDArray[np.int64], start: int, end: int) -> None:
    """Stretch a cluster's ranges, in place, over the gap that was added to it."""
    if np.any(cluster[:, 0] == cluster[:, 1]):
        cluster[:] = (start, end)
    cluster[cluster[:, 1] == cluster[:, 1].max(), 1] = end
    cluster[cluster[:, 0] == cluster[0, 0], 0] = start


def _fill_gaps(bounds: list[tuple[int, int]], text: bytes) -> list[tuple[int, int]]:
    filled: list[tuple[int, int]] = []
    for place, (start, end) in enumerate(bounds):
        if place == 0 and _was_composed(text[:start]):
            start = 0
        next_start = bounds[place + 1][0] if place + 1 < len(bounds) else len(text)
        if _was_composed(text[end:next_start]):
            end = next_start
        filled.append((start, end))
    return filled


def _was_composed(gap: bytes) -> bool:
    characters = gap.decode("utf-8", errors="replace")
    return bool(characters) and not any(
        character.isspace() or unicodedata.category(character).startswith("C")
        for character in characters
    )
