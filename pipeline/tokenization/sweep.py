"""Characters on which a fast encoder differs from the reference, found by trying all of them.

Libraries are built with tables of different versions of Unicode, so that one takes a character for
a symbol which the other does not know. Documents that hold such a character take the reference.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from pipeline.remote.user_cache import cache_folder, keep
from pipeline.tokenization.kernels import holds_marked_character

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of code points."""

SameTokens = Callable[[Sequence[str]], NDArray[np.bool_]]
"""Says for each text whether both encoders give the same ids, bool [D]."""

CONTEXT = "a{0}b1{0}1 {0}.{0}'{0}e'r{0}\n"
"""Between letters, between digits, after a space, between punctuation, at a line's end, and inside
what could be a contraction, whose letters libraries compare in ways of their own."""

SWEPT: Ranges = ((0x80, 0xD800), (0xE000, 0xE080), (0xF8E0, 0x33480), (0xE0000, 0xE01F0))
"""All code points that are assigned, or could be in a library's tables: private use and the planes
without characters are tried by a few."""

FORMAT = 1
"""Raised when what is tried changes, so that an older result is not taken for a new one."""

_WHAT_TAKES_TIME = "comparing encoders on every character, once for this tokenizer"
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


def find_differing(same_tokens: SameTokens) -> DifferingCharacters:
    """Try every character in context, many in a text, and bisect the texts that differ.

    Args:
        same_tokens: says for each text whether both encoders give the same ids.
    """
    code_points = [c for start, end in SWEPT for c in range(start, end)]
    groups = [code_points[i : i + _BATCH] for i in range(0, len(code_points), _BATCH)]
    differing: list[int] = []
    with _bar(len(code_points)) as bar:
        for i in range(0, len(groups), _BATCHES_AT_ONCE):
            tried = groups[i : i + _BATCHES_AT_ONCE]
            differing += _bisect(_wrong(tried, same_tokens), same_tokens)
            bar.update(sum(map(len, tried)))
    return DifferingCharacters(tuple(_as_ranges(sorted(differing))))


def remembered_differing(key: str, find: Callable[[], DifferingCharacters]) -> DifferingCharacters:
    """Return what `find` gives, from the user's cache folder where it was found before.

    Args:
        key: whatever determines the result: a tokenizer's hash, options, versions of libraries.
        find: takes seconds.
    """
    name = sha256(f"{FORMAT} {key}".encode()).hexdigest()[:32]
    path = cache_folder("fast-path") / f"{name}.json"
    remembered = _read(path)
    if remembered is not None:
        return remembered
    start = time.monotonic()
    logger.info(_WHAT_TAKES_TIME)
    found = find()
    logger.info("%d characters differ, in %.1f s", len(found), time.monotonic() - start)
    keep(path, json.dumps(found.ranges))
    return found


def library_versions() -> tuple[str, ...]:
    """Return the versions of the libraries that encode."""
    return tuple(map(version, ("gigatoken", "sentencepiece", "tokenizers")))


def _bar(num_characters: int) -> tqdm:
    """Return a bar on a terminal's stderr; none where only errors are to be seen."""
    hidden = None if logger.isEnabledFor(logging.WARNING) else True  # None: but on terminals
    return tqdm(
        total=num_characters, unit=" characters", unit_scale=True, desc=_WHAT_TAKES_TIME,
        dynamic_ncols=True, leave=False, disable=hidden,
    )  # fmt: skip


def _wrong(groups: Sequence[list[int]], same_tokens: SameTokens) -> list[list[int]]:
    texts = ["".join(CONTEXT.format(chr(c)) for c in group) for group in groups]
    same = same_tokens(texts)
    return [group for group, equal in zip(groups, same, strict=True) if not equal]


def _bisect(groups: list[list[int]], same_tokens: SameTokens) -> list[int]:
    """Return the characters that make groups differ; all of a group where no part of it does."""
    differing: list[int] = []
    while groups:
        differing += [group[0] for group in groups if len(group) == 1]
        divided = [group for group in groups if len(group) > 1]
        halves = [half for group in divided for half in _halves(group)]
        wrong = _wrong(halves, same_tokens) if halves else []
        firsts = {half[0] for half in wrong}
        for group in divided:
            if not firsts & {half[0] for half in _halves(group)}:
                differing += group
        groups = wrong
    return differing


def _halves(group: list[int]) -> tuple[list[int], list[int]]:
    middle = len(group) // 2
    return group[:middle], group[middle:]


def _as_ranges(code_points: Sequence[int]) -> Iterator[tuple[int, int]]:
    if not code_points:
        return
    start = code_points[0]
    for one, following in pairwise(code_points):
        if following != one + 1:
            yield start, one + 1
            start = following
    yield start, code_points[-1] + 1


def _read(path: Path) -> DifferingCharacters | None:
    """Return what was written, None where nothing readable was."""
    try:
        body = json.loads(path.read_bytes())
        return DifferingCharacters(tuple((int(start), int(end)) for start, end in body))
    except (OSError, ValueError, TypeError):
        return None
