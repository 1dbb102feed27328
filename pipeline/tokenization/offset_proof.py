"""Mend the offsets that tokenizers report, and prove them by content.

Reports are wrong in known ways: all pieces of a character claim it whole, and SentencePiece's dummy
prefix claims the first one. The proof normalises each range of the text on its own and compares it
with its tokens' bytes.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import Ranges
from pipeline.tokenization.normalization import Normalize, framed

_WHITE_SPACE = b" \t\n\x0b\x0c\r"


def byte_positions(text: str) -> NDArray[np.int64]:
    """Return the byte position of each character and of the end.

    Example:
        >>> byte_positions("aé").tolist()
        [0, 1, 3]
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def mend_offsets(
    reported: NDArray[np.int64], text: bytes, contents: Sequence[bytes]
) -> NDArray[np.int64]:
    """Separate reported byte ranges, non-decreasing [T, 2], as far as the text allows.

    Tokens whose ranges overlap or share a start are a cluster. If they spell it, they are laid side
    by side; a leading space may be a dummy prefix, which covers no byte. Others keep their ranges,
    but all cover the whole cluster if one is empty.
    """
    offsets = reported.copy()
    if len(offsets) == 0:
        return offsets
    new = (offsets[1:, 0] >= offsets[:-1, 1]) & (offsets[1:, 0] > offsets[:-1, 0])
    firsts = np.flatnonzero(np.concatenate([[True], new]))
    stops = np.append(firsts[1:], len(offsets))
    for c in np.flatnonzero(stops - firsts > 1).tolist():
        cluster = offsets[firsts[c] : stops[c]]
        start, end = int(cluster[0, 0]), int(cluster[-1, 1])
        _lay_out(cluster, start, end, text, contents[firsts[c] : stops[c]])
    return offsets


def find_unproven(
    byte_offsets: Ranges,
    contents: Sequence[bytes],
    text: bytes,
    normalize: Normalize,
    *,
    lost_bytes: bytes = b"",
    keeps_spaces: bool = True,
) -> list[int]:
    """Find the tokens whose ranges don't contain their bytes.

    `byte_offsets` [T, 2] must not decrease; unknown `contents` are b"". The vocabulary drops
    `lost_bytes`, and white space unless `keeps_spaces`; a space may always be added before a token.
    """
    rewrite = framed(normalize)
    ranges = byte_offsets.tolist()
    runs = list(_runs(ranges))
    if rewrite is None:
        return list(range(len(ranges)))
    first_byte, last_byte = _edges(text.decode(), rewrite)
    unproven: list[int] = []
    for number, (first, stop) in enumerate(runs):
        if stop == first + 1 and contents[first] == text[slice(*ranges[first])]:
            continue
        a, b = _whole_characters(runs, ranges, text, number)
        start, end = ranges[a][0], ranges[b - 1][1]
        while (
            start > 0
            and text[start - 1] in lost_bytes
            and b"\x80" <= text[start : start + 1] < b"\xc0"
        ):
            start -= 1  # lost: no token covers a character's first byte
        while end < len(text) and text[end] in lost_bytes and 0x80 <= text[end] < 0xC0:
            end += 1
        try:
            normalized = rewrite(text[start:end].decode()).encode().translate(None, lost_bytes)
            at_edges = start <= first_byte, end >= last_byte
            proven = _holds(normalized, contents[a:b], keeps_spaces, at_edges)
        except ValueError:  # half a character, or one that can't be normalised alone
            proven = False
        unproven += () if proven else range(first, stop)
    return unproven


def spelled_from(
    spelled: bytes, piece: bytes, *, at_start: bool = True, at_end: bool = True
) -> int | None:
    """Return where tokens begin in a piece of a normalised text, None if they don't spell it.

    -1 if a space comes first. White space may be missing at the text's ends (`at_start`, `at_end`),
    and a space may come last instead.

    Example:
        >>> spelled_from(b" a b", b"a b ")
        -1
    """
    if spelled in (piece, b" " + piece):
        return len(piece) - len(spelled)
    core = spelled.strip() or spelled.strip(b" ")
    if core not in piece or not core:
        return None
    (head, _, tail), (piece_head, _, piece_tail) = spelled.partition(core), piece.partition(core)
    if (piece_head + piece_tail).strip():
        return None
    starts = head in (piece_head, b" " + piece_head) or (at_start and piece_head.endswith(head))
    ends = tail == piece_tail or (at_end and (piece_tail + b" ").startswith(tail))
    return len(piece_head) - len(head) if starts and ends else None


def _lay_out(
    cluster: NDArray[np.int64], start: int, end: int, text: bytes, contents: Sequence[bytes]
) -> None:
    spelled, covered = b"".join(contents), text[start:end]
    if all(contents) and spelled in (covered, b" " + covered):
        token_ends = end - len(spelled) + np.cumsum([len(content) for content in contents])
        cluster[1:, 0] = token_ends[:-1]
        cluster[0, 0], cluster[:, 1] = start, token_ends
    elif np.any(cluster[:, 0] == cluster[:, 1]):
        cluster[:] = (start, end)


def _runs(ranges: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield (first token, stop) of runs that share bytes."""
    first = 0
    for i in range(1, len(ranges) + 1):
        start, end = ranges[i - 1]
        if i == len(ranges) or ranges[i][0] >= end or start == end:
            yield first, i
            first = i


def _whole_characters(
    runs: Sequence[tuple[int, int]], ranges: Sequence[Sequence[int]], text: bytes, number: int
) -> tuple[int, int]:
    """Extend a run by the neighbours that share a character with it."""

    def divides(place: int) -> bool:
        return b"\x80" <= text[place : place + 1] < b"\xc0"

    a = b = number
    while a > 0 and divides(ranges[runs[a][0]][0]):
        a -= 1
    while b + 1 < len(runs) and divides(ranges[runs[b][1] - 1][1]):
        b += 1
    return runs[a][0], runs[b][1]


def _edges(text: str, rewrite: Normalize) -> tuple[int, int]:
    """Return the range without blank ends, which normalising may trim."""
    try:
        head, tail = (
            "".join(takewhile(lambda character: not rewrite(character).strip(), characters))
            for characters in (text, reversed(text))
        )
    except ValueError:  # a character that can't be normalised on its own isn't blank
        head = tail = ""
    return len(head.encode()), len(text.encode()) - len(tail.encode())


def _holds(
    normalized: bytes, contents: Sequence[bytes], keeps_spaces: bool, at_edges: tuple[bool, bool]
) -> bool:
    if not keeps_spaces:
        normalized = normalized.translate(None, _WHITE_SPACE)
        contents = [content.translate(None, _WHITE_SPACE) for content in contents]
    at_start, at_end = at_edges
    if all(contents):
        joined = b"".join(contents)
        is_blank = not joined.strip(b" ") and not normalized.strip()
        ends = at_start and normalized.endswith(joined)
        if is_blank and (ends or (at_end and normalized.startswith(joined))):
            return True
        return spelled_from(joined, normalized, at_start=at_start, at_end=at_end) is not None
    normalized += b" " if at_end else b""
    place = 0  # unknown tokens may cover anything between the known ones
    for content in filter(None, contents):
        found = normalized.find(content, place)
        if found < 0:
            found = normalized.find(content.removeprefix(b" "), place)
        if found < 0:
            return False
        place = found + len(content.removeprefix(b" "))
    return True
