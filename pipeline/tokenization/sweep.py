"""Characters on which a fast encoder differs from the reference, found by trying all of them.

Libraries are built with tables of different versions of Unicode, so that one takes a character for
a symbol which the other does not know. Documents that hold such a character take the reference.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.remote.user_cache import cache_folder, keep
from pipeline.tokenization.kernels import holds_marked_character

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of code points."""

Groups = list[list[int]]
"""Code points, those of a group in one text."""

SameTokens = Callable[[Sequence[str]], NDArray[np.bool_]]
"""Says for each text whether both encoders give the same ids, bool [D]."""

IDS_CONTEXT = "a{0}b {0}.{0}\n"
"""Between letters, after a space, between punctuation, at a line's end: which tokens the character
itself has. Where texts are split around it is seen elsewhere (`comparison.CONTEXT`)."""

SWEPT: Ranges = ((0x80, 0xD800), (0xE000, 0xE080), (0xF8E0, 0x33480), (0xE0000, 0xE01F0))
"""All code points that are assigned, or could be in a library's tables."""

ELSEWHERE: Ranges = ((0xE080, 0xF8E0), (0x33480, 0xE0000), (0xE01F0, 0x110000))
"""Private use and the planes without characters: one code point in `STRIDE` is tried for all."""

STRIDE = 64

FORMAT = 2
"""Raised when what is tried changes, so that an older result is not taken for a new one."""

KNOWN_SWEEPS = Path(__file__).with_name("known_sweeps.json")
"""By their names, what sweeps of well-known tokenizers found, so that a first run needs none."""

_BATCH = 256
_BATCHES_AT_ONCE = 64
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DifferingCharacters:
    """Characters whose documents take the reference.

    Attributes:
        ranges: half-open ranges of code points, in order.
    """

    ranges: Ranges

    def __len__(self) -> int:
        """Number of characters."""
        return sum(end - start for start, end in self.ranges)

    def __or__(self, other: "DifferingCharacters") -> "DifferingCharacters":
        """Return the characters of both."""
        return DifferingCharacters(_united([*self.ranges, *other.ranges]))

    def in_texts(self, texts: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return which texts (UTF-8) hold one, bool [D]; ASCII ones are not looked at.

        Example:
            >>> DifferingCharacters(((0x20C1, 0x20C2),)).in_texts([b"a", "\u20c1".encode()])
            array([False,  True])
        """
        if not self.ranges:
            return np.zeros(len(texts), np.bool_)
        found = np.zeros(len(texts), np.bool_)
        for d, text in enumerate(texts):
            if not text.isascii():
                found[d] = holds_marked_character(np.frombuffer(text, np.uint8), self._table)
        return found

    @cached_property
    def _table(self) -> NDArray[np.bool_]:
        table = np.zeros(0x110000, np.bool_)
        for start, end in self.ranges:
            table[start:end] = True
        return table


def find_differing(same_tokens: SameTokens, context: str) -> DifferingCharacters:
    """Try every character in context, many in a text, and bisect the texts that differ.

    `same_tokens` says for each text whether both encoders give the same ids; `context` is what is
    around a character, which is written `{0}`.
    """
    code_points = [c for start, end in SWEPT for c in range(start, end)]
    code_points += [c for start, end in ELSEWHERE for c in range(start, end, STRIDE)]
    groups = [code_points[i : i + _BATCH] for i in range(0, len(code_points), _BATCH)]
    differing: list[int] = []
    wrong = partial(_wrong, same_tokens, context)
    for i in range(0, len(groups), _BATCHES_AT_ONCE):
        differing += _bisect(wrong(groups[i : i + _BATCHES_AT_ONCE]), wrong)
    return DifferingCharacters(_united([_stands_for(c) for c in differing]))


def remembered_differing(key: str, find: Callable[[], DifferingCharacters]) -> DifferingCharacters:
    """Return what `find` gives in seconds: shipped, from the user's cache folder, or found now.

    `key` is whatever determines the result: a tokenizer's hash, options, versions of libraries.
    """
    name = name_of_sweep(key)
    known = known_sweeps().get(name)
    if known is not None:
        return known
    path = cache_folder("fast-path") / f"{name}.json"
    remembered = _read(path)
    if remembered is not None:
        return remembered
    start = time.monotonic()
    logger.info("comparing encoders on every character, once for this tokenizer")
    found = find()
    logger.info("%d characters differ, in %.1f s", len(found), time.monotonic() - start)
    keep(path, json.dumps(found.ranges))
    return found


def name_of_sweep(key: str) -> str:
    """Return the name under which a sweep's result is shipped or kept."""
    return sha256(f"{FORMAT} {key}".encode()).hexdigest()[:32]


@cache
def known_sweeps() -> Mapping[str, DifferingCharacters]:
    """Return what comes with the package, by name; `tests/support/sweep_known.py` makes it."""
    body = json.loads(KNOWN_SWEEPS.read_bytes())
    return {name: _from_json(entry["ranges"]) for name, entry in body.items()}


def library_versions() -> tuple[str, ...]:
    """Return the versions of the libraries that encode."""
    return tuple(map(version, ("gigatoken", "sentencepiece", "tokenizers")))


def _wrong(same_tokens: SameTokens, context: str, groups: Groups) -> Groups:
    if not groups:
        return []
    texts = ["".join(context.replace("{0}", chr(c)) for c in group) for group in groups]
    same = same_tokens(texts)
    return [group for group, equal in zip(groups, same, strict=True) if not equal]


def _bisect(groups: Groups, wrong: Callable[[Groups], Groups]) -> list[int]:
    """Return the characters that make groups differ; all of a group if no part of it does."""
    differing: list[int] = []
    while groups:
        differing += [group[0] for group in groups if len(group) == 1]
        divided = [group for group in groups if len(group) > 1]
        still_wrong = wrong([half for group in divided for half in _halves(group)])
        firsts = {half[0] for half in still_wrong}
        for group in divided:
            if not firsts & {half[0] for half in _halves(group)}:
                differing += group
        groups = still_wrong
    return differing


def _halves(group: list[int]) -> tuple[list[int], list[int]]:
    middle = len(group) // 2
    return group[:middle], group[middle:]


def _stands_for(code_point: int) -> tuple[int, int]:
    """Return the range of code points that were tried by one."""
    ends = [end for start, end in ELSEWHERE if start <= code_point < end]
    return code_point, min(code_point + STRIDE, ends[0]) if ends else code_point + 1


def _united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order, those that touch as one."""
    united: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return tuple(united)


def _read(path: Path) -> DifferingCharacters | None:
    """Return what was written, None if nothing readable was."""
    try:
        return _from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _from_json(ranges: Iterable[Sequence[int]]) -> DifferingCharacters:
    return DifferingCharacters(tuple((int(start), int(end)) for start, end in ranges))
