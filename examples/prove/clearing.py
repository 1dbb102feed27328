"""Which documents share text with others: runs of 13 words, and near copies with other numbers."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

RUN_WORDS = 13
SHINGLE_WORDS = 5
NEAR = 0.5
"""Two texts are near duplicates if this share of their shingles is common, numbers aside."""
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+")


class HasText(Protocol):
    """Anything with a text."""

    @property
    def text(self) -> str:
        """The text."""


def without_overlap[D: HasText](documents: Sequence[D], others: Sequence[HasText]) -> list[D]:
    """Return the documents that share no run of 13 words with others, and are near none of them.

    Example:
        >>> from types import SimpleNamespace as T
        >>> without_overlap([T(text="six apples and six pears")], [T(text="2 apples and 3 pears")])
        [namespace(text='six apples and six pears')]
    """
    runs = {run for other in others for run in _runs(other.text, RUN_WORDS)}
    shingles = [set(_runs(_DIGITS.sub("0", other.text), SHINGLE_WORDS)) for other in others]
    having: dict[int, list[int]] = {}
    for number, own in enumerate(shingles):
        for shingle in own:
            having.setdefault(shingle, []).append(number)
    return [
        document
        for document in documents
        if runs.isdisjoint(_runs(document.text, RUN_WORDS))
        and not _is_near(document.text, shingles, having)
    ]


def _is_near(text: str, others: Sequence[set[int]], having: dict[int, list[int]]) -> bool:
    own = set(_runs(_DIGITS.sub("0", text), SHINGLE_WORDS))
    common = Counter(number for shingle in own for number in having.get(shingle, ()))
    return any(
        count >= NEAR * (len(own) + len(others[number]) - count) for number, count in common.items()
    )


def _runs(text: str, num_words: int) -> list[int]:
    """Return a number for every run of words; a shorter text is one run."""
    words = _WORD.findall(text.lower())
    starts = range(max(1, len(words) - num_words + 1))
    return [hash(tuple(words[start : start + num_words])) for start in starts]
