"""Map the bytes of a text to the bytes of its normalised form.

Libraries report this wrongly if marks are reordered, composed or dropped. So the normaliser is
tried on ever smaller pieces, between letters that protect their ends, as long as results join to
the whole one.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Normalize = Callable[[str], str]
Levels = Sequence[Callable[[str], list[str]]]
"""Ways to divide a piece, the coarsest first."""

_FRAME = "q"
"""A letter that no mark composes with, and that no known normaliser changes."""

_BLOCK = re.compile(r".{1,512}\S*\s*", re.DOTALL)
_WORD = re.compile(r"\s+|\S+")
_CACHED_PIECES = 1 << 14


@dataclass(frozen=True, eq=False)
class Rewriting:
    """A text's normalised form, and where it differs.

    Attributes:
        normalized: UTF-8 bytes, without additions around the text.
        changes: int64 [C, 4], changed pieces in order: start and end in the text, then in the
            normalised bytes.
    """

    normalized: bytes
    changes: NDArray[np.int64]

    def to_text(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map non-decreasing ranges of normalised bytes to the text's, int64 [T, 2] both.

        A range that divides a changed piece covers all of it.
        """
        if len(self.changes) == 0:
            return ranges.copy()
        text_starts, text_ends, starts, ends = self.changes.T
        last = np.searchsorted(starts, ranges[:, 0], side="right") - 1
        after = np.where(last >= 0, ranges[:, 0] - ends[last] + text_ends[last], ranges[:, 0])
        inside = (last >= 0) & (ranges[:, 0] < ends[last])
        first_bytes = np.where(inside, text_starts[last], after)
        following = np.searchsorted(ends, ranges[:, 1], side="left")
        known = np.minimum(following, len(ends) - 1)
        beyond = ranges[:, 1] - ends[-1] + text_ends[-1]
        before = ranges[:, 1] - starts[known] + text_starts[known]
        inside = ranges[:, 1] > starts[known]
        last_bytes = np.where(inside, text_ends[known], before)
        last_bytes = np.where(following < len(ends), last_bytes, beyond)
        # An empty range next to a piece that was dropped comes before it.
        return np.stack([np.minimum(first_bytes, last_bytes), last_bytes], axis=1)

    def widen(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Widen ranges of the text over the changed pieces they divide."""
        if len(self.changes) == 0:
            return ranges.copy()
        text_starts, text_ends = self.changes[:, 0], self.changes[:, 1]
        widened = ranges.copy()
        for column in (0, 1):
            piece = np.searchsorted(text_ends, ranges[:, column], side="right")
            known = np.minimum(piece, len(text_ends) - 1)
            divides = (piece < len(text_ends)) & (text_starts[known] < ranges[:, column])
            widened[divides, column] = self.changes[known[divides], column]
        return widened


def follow_normalizer(text: str, normalize: Normalize) -> Rewriting | None:
    """Map a text's bytes to those of its normalised form, None if neighbours aren't kept apart.

    Pieces are characters with their marks, else words, else blocks of some hundred characters.
    """
    rewrite = framed(normalize)
    if rewrite is None:
        return None
    rewrite = lru_cache(_CACHED_PIECES)(rewrite)
    normalized: list[bytes] = []
    changes: list[tuple[int, int, int, int]] = []
    start = place = 0
    try:
        for source, result in _pieces(text, rewrite):
            source_bytes, result_bytes = source.encode(), result.encode()
            end, next_place = start + len(source_bytes), place + len(result_bytes)
            if source != result:
                changes.append((start, end, place, next_place))
            normalized.append(result_bytes)
            start, place = end, next_place
    except _FrameLostError:
        return None
    return Rewriting(b"".join(normalized), np.array(changes, np.int64).reshape(-1, 4))


def framed(normalize: Normalize) -> Normalize | None:
    """Return the normaliser of a framed piece, None if it changes the frame."""
    before, kept, after = normalize(_FRAME * 2).partition(_FRAME * 2)
    if not kept:
        return None
    before, after = before + _FRAME, _FRAME + after

    def rewrite(piece: str) -> str:
        result = normalize(f"{_FRAME}{piece}{_FRAME}")
        long_enough = len(result) >= len(before) + len(after)
        if not (long_enough and result.startswith(before) and result.endswith(after)):
            raise _FrameLostError
        return result[len(before) : len(result) - len(after)]

    return rewrite


class _FrameLostError(ValueError):
    """A normaliser merged a piece with its neighbour."""


def _pieces(text: str, rewrite: Normalize) -> Iterator[tuple[str, str]]:
    for block in _blocks(text, rewrite):
        result = rewrite(block)
        if result == block:
            yield block, block
        else:
            yield from _divide(block, result, rewrite, (_WORD.findall, _clusters))


def _blocks(text: str, rewrite: Normalize) -> Iterator[str]:
    """Yield blocks; none begins with text that may join the white space before it."""
    block = ""
    for match in _BLOCK.finditer(text):
        if block and rewrite(match[0][0])[:1].strip(" "):
            yield block
            block = ""
        block += match[0]
    if block:
        yield block


def _divide(
    piece: str, result: str, rewrite: Normalize, levels: Levels
) -> Iterator[tuple[str, str]]:
    """Divide a changed piece, as far as possible, into parts whose results join to its."""
    for division, finer in _divisions(piece, rewrite, levels):
        results = [rewrite(part) for part in division]
        if "".join(results) != result:
            continue
        for part, became in zip(division, results, strict=True):
            if part == became:
                yield part, became
            elif finer:
                yield from _divide(part, became, rewrite, finer)
            else:
                yield from _without_equal_ends(part, became, rewrite)
        return


def _divisions(
    piece: str, rewrite: Normalize, levels: Levels
) -> Iterator[tuple[list[str], Levels]]:
    """Yield ever coarser divisions of a piece, each with the levels for its parts."""
    parts = levels[0](piece)
    yield parts, levels[1:]
    parts = _without_meeting_blanks(parts, rewrite)
    yield parts, levels[1:]
    middle = len(parts) // 2
    if middle:
        yield ["".join(parts[:middle]), "".join(parts[middle:])], levels
    yield [piece], levels[1:]


def _without_meeting_blanks(parts: Sequence[str], rewrite: Normalize) -> list[str]:
    """Join parts where spaces meet, or a part becomes empty after one."""
    joined: list[list[str]] = []
    meets = False
    for part in parts:
        result = rewrite(part)
        if meets and not result[:1].strip(" "):
            joined[-1].append(part)
        else:
            joined.append([part])
        meets = result.endswith(" ") or (meets and not result)
    return ["".join(each) for each in joined]


def _without_equal_ends(source: str, result: str, rewrite: Normalize) -> Iterator[tuple[str, str]]:
    """Cut equal characters off both ends of a changed piece.

    Both rests keep one, so a base keeps its dropped marks.
    """
    shorter = min(len(source), len(result)) - 1
    head = 0
    while head < shorter and source[head] == result[head]:
        head += 1
    tail = 0
    while tail < shorter - head and source[-1 - tail] == result[-1 - tail]:
        tail += 1
    rest, became = source[head : len(source) - tail], result[head : len(result) - tail]
    if rewrite(rest) != became:
        yield source, result
        return
    yield source[:head], source[:head]
    yield rest, became
    yield source[len(source) - tail :], source[len(source) - tail :]


def _clusters(word: str) -> list[str]:
    """Divide a word into characters, each with the next ones that may join it."""
    cuts = [0, *(n for n in range(1, len(word)) if not _joins(word[n])), len(word)]
    return [word[start:end] for start, end in pairwise(cuts)]


@cache
def _joins(character: str) -> bool:
    """Whether normalising may join a character to the one before it: marks, Hangul vowels."""
    if character.isascii():
        return False
    first = unicodedata.normalize("NFKD", character)[0]
    conjoining = "\u1160" <= first <= "\u11ff" or "\ud7b0" <= first <= "\ud7ff"
    return conjoining or any(unicodedata.category(c)[0] == "M" for c in (character, first))
