"""Normalisers followed character by character, in the plainest way there is.

Every character of the normalised text knows which characters of the text it came from. Nothing
here is shared with the product: decomposing, reordering and composing are written out.
"""

import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Traced(NamedTuple):
    """A character of a normalised text, and the places in the text of those it came from."""

    character: str
    sources: frozenset[int]


Step = Callable[[list[Traced]], list[Traced]]


def trace(text: str, steps: Sequence[Step]) -> list[Traced]:
    """Return the normalised text, each character with its sources."""
    traced = [Traced(character, frozenset([i])) for i, character in enumerate(text)]
    for step in steps:
        traced = step(traced)
    return traced


def decompose(form: str) -> Step:
    """Return the step NFD or NFKD: each character taken apart, then marks put in order."""

    def step(traced: list[Traced]) -> list[Traced]:
        apart = [
            Traced(part, sources)
            for character, sources in traced
            for part in unicodedata.normalize(form, character)
        ]
        return _in_order(apart)

    return step


def compose(form: str) -> Step:
    """Return the step NFC or NFKC: decomposed, then each mark joined to a starter that takes it."""
    take_apart = decompose({"NFC": "NFD", "NFKC": "NFKD"}[form])

    def step(traced: list[Traced]) -> list[Traced]:
        joined: list[Traced] = []
        starter: int | None = None
        for character, sources in take_apart(traced):
            mark_class = unicodedata.combining(character)
            before = unicodedata.combining(joined[-1].character) if joined else 0
            adjacent = starter is not None and starter == len(joined) - 1
            free = adjacent or (0 < before < mark_class)
            if starter is not None and free:
                pair = unicodedata.normalize("NFC", joined[starter].character + character)
                if len(pair) == 1:
                    joined[starter] = Traced(pair, joined[starter].sources | sources)
                    continue
            if mark_class == 0:
                starter = len(joined)
            joined.append(Traced(character, sources))
        return joined

    return step


def lower(traced: list[Traced]) -> list[Traced]:
    """Each character in lower case, by itself."""
    return [Traced(part, sources) for c, sources in traced for part in c.lower()]


def without_marks(traced: list[Traced]) -> list[Traced]:
    """Drop marks of all kinds."""
    return [entry for entry in traced if unicodedata.category(entry.character)[0] != "M"]


def without_accents(traced: list[Traced]) -> list[Traced]:
    """Drop non-spacing marks."""
    return [entry for entry in traced if unicodedata.category(entry.character) != "Mn"]


def one_space(traced: list[Traced]) -> list[Traced]:
    """Write each run of white space as one space."""
    written: list[Traced] = []
    for character, sources in traced:
        if not character.isspace():
            written.append(Traced(character, sources))
        elif written and written[-1].character == " ":
            written[-1] = Traced(" ", written[-1].sources | sources)
        else:
            written.append(Traced(" ", sources))
    return written


def token_sources(pieces: Sequence[bytes], traced: Sequence[Traced], text: str) -> list[set[int]]:
    """Return the bytes of the text that each token's own bytes came from.

    A byte of a character that was not changed comes from one byte; of one that was, from all bytes
    of its sources. White space may be missing in the pieces or too much.
    """
    origins: list[tuple[int, set[int]]] = []
    starts = [len(text[:i].encode()) for i in range(len(text) + 1)]
    for character, sources in traced:
        own = {byte for i in sources for byte in range(starts[i], starts[i + 1])}
        same = len(sources) == 1 and text[min(sources)] == character
        for place, byte in enumerate(character.encode()):
            origins.append((byte, {min(own) + place} if same else own))
    found: list[set[int]] = []
    position = 0
    for piece in pieces:
        covered: set[int] = set()
        for byte in piece:
            while _is_at(position, origins) not in (byte, None) and _blank(origins[position][0]):
                position += 1
            if _is_at(position, origins) == byte:
                covered |= origins[position][1]
                position += 1
            else:
                assert _blank(byte), f"{piece!r} is not at byte {position} of the normalised text"
        found.append(covered)
    return found


def cluster_hull(text: str, sources: set[int]) -> tuple[int, int]:
    """Return the bytes from the base before a set of bytes to the last mark behind it."""
    starts = [len(text[:i].encode()) for i in range(len(text) + 1)]
    first = next(i for i in range(len(text)) if starts[i + 1] > min(sources))
    last = next(i for i in range(len(text)) if starts[i + 1] > max(sources))
    while first > 0 and _leans(text[first]):
        first -= 1
    while last + 1 < len(text) and _leans(text[last + 1]):
        last += 1
    return starts[first], starts[last + 1]


def _in_order(traced: list[Traced]) -> list[Traced]:
    ordered: list[Traced] = []
    for entry in traced:
        own, place = _mark_class(entry), len(ordered)
        while own and place and _mark_class(ordered[place - 1]) > own:
            place -= 1
        ordered.insert(place, entry)
    return ordered


def _mark_class(entry: Traced) -> int:
    return unicodedata.combining(entry.character)


def _leans(character: str) -> bool:
    parts = unicodedata.normalize("NFKD", character)
    vowel_or_tail = "\u1160" <= parts[0] <= "\u11ff" or "\ud7b0" <= parts[0] <= "\ud7ff"
    return vowel_or_tail or unicodedata.category(parts[0]) in ("Mn", "Mc", "Me")


def _is_at(position: int, origins: Sequence[tuple[int, set[int]]]) -> int | None:
    return origins[position][0] if position < len(origins) else None


def _blank(byte: int) -> bool:
    return bytes([byte]).isspace()
