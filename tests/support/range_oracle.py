"""Which bytes of a text each token came from, by normalising every beginning and end of the text.

Slow and obvious: nothing is known of normalisers but what they make of a text.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import NamedTuple

from tests.support.normalizer_oracle import cluster_hull

Normalize = Callable[[str], str]
FRAME = "q"


class Bounds(NamedTuple):
    """Between which ranges a token's range lies.

    Attributes:
        own: bytes without which the token would not be.
        hull: a range around them that normalises apart from the rest: with marks behind a
            character, and what becomes nothing next to it.
    """

    own: set[int]
    hull: tuple[int, int]


def bound_ranges(text: str, pieces: Sequence[bytes], normalize: Normalize) -> list[Bounds] | None:
    """Return the bounds of each token's range; None if nothing but white space is left.

    Args:
        text: the text.
        pieces: what its tokens stand for in the normalised text.
        normalize: gives a string's normalised form.
    """
    before, after = normalize(FRAME * 2).split(FRAME * 2)

    def frame(piece: str) -> str:
        framed = normalize(FRAME + piece + FRAME)
        return framed.removeprefix(before + FRAME).removesuffix(FRAME + after)

    whole, spelled = frame(text), b"".join(pieces)
    if not whole.strip():
        return None
    places = [0, *accumulate(len(character.encode()) for character in text)]
    parts = [(frame(text[:k]), frame(text[k:])) for k in range(len(text) + 1)]
    cuts = [place for place, part in zip(places, parts, strict=True) if "".join(part) == whole]
    reached = [len(commonprefix([part, whole]).encode()) for part, _ in parts]
    settled = [*accumulate(reversed(reached), min)][::-1]
    sources = _sources(text, whole.encode(), places, settled)
    data = whole.encode()
    shift = (len(data) - len(data.lstrip())) - (len(spelled) - len(spelled.lstrip()))
    ends = accumulate(map(len, pieces), initial=shift)
    assert data[max(shift, 0) :].startswith(spelled[max(-shift, 0) :].rstrip())
    return [_bounds(text, sources, cuts, start, end) for start, end in pairwise(ends)]


def _sources(text: str, whole: bytes, places: list[int], settled: list[int]) -> list[set[int]]:
    """Return for each normalised byte the bytes of the character with which it was settled."""
    sources: list[set[int]] = []
    for k, character in enumerate(text):
        start, end = settled[k : k + 2]
        own = range(places[k], places[k + 1])
        same = whole[start:end] == character.encode()
        sources += [{own[n]} if same else set(own) for n in range(end - start)]
    return sources


def _bounds(text: str, sources: list[set[int]], cuts: list[int], start: int, end: int) -> Bounds:
    own = set[int]().union(*sources[max(start, 0) : max(end, 0)])
    if not own:
        return Bounds(own, (0, cuts[-1]))
    first, last = cluster_hull(text, set(range(*_between(cuts, min(own), max(own) + 1))))
    others = {place for settled in sources for place in settled} - own
    before = max((place + 1 for place in others if place < first), default=0)
    after = min((place for place in others if place >= last), default=cuts[-1])
    return Bounds(own, _between(cuts, min(first, before), max(last, after)))


def _between(cuts: list[int], start: int, end: int) -> tuple[int, int]:
    """Return a range, widened to the nearest cuts."""
    return max(cut for cut in cuts if cut <= start), min(cut for cut in cuts if cut >= end)
