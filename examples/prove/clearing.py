"""Which documents share text with others: runs of 13 words, and near copies with other numbers."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hold_out import word_runs

SHINGLE_WORDS = 5
NEAR = 0.5
"""Two texts are near duplicates if this share of their shingles is common, numbers aside."""
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
    runs = {run for other in others for run in word_runs(other.text)}
    shingles = [set(word_runs(_DIGITS.sub("0", other.text), SHINGLE_WORDS)) for other in others]
    having: dict[int, list[int]] = {}
    for number, own in enumerate(shingles):
        for shingle in own:
            having.setdefault(shingle, []).append(number)
    return [
        document
        for document in documents
        if runs.isdisjoint(word_runs(document.text))
        and not _is_near(document.text, shingles, having)
    ]


def _is_near(text: str, others: Sequence[set[int]], having: dict[int, list[int]]) -> bool:
    own = set(word_runs(_DIGITS.sub("0", text), SHINGLE_WORDS))
    common = Counter(number for shingle in own for number in having.get(shingle, ()))
    return any(
        count >= NEAR * (len(own) + len(others[number]) - count) for number, count in common.items()
    )
