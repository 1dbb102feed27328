"""A copy of a tokenizer whose ids show where a text is split before the model sees it.

A tokenizer's own ids hide most splits: where no merge spans a place, it makes no difference
whether the text is divided there. The copy normalises and splits as the tokenizer does, and its
model merges whatever `CONTEXT` puts side by side and no split keeps apart.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from pipeline.tokenization.contents import write_byte_level
from pipeline.tokenization.definition import Definition, is_byte_level, pre_tokenizer_steps

CONTEXT = "\n  {0}Aa\n一{0}一\na'{0}a\n!!{0}1\ne\u0301{0}\u0334"
"""A character behind spaces and before capitals, between ideographs, where a contraction may end,
between punctuation and a digit, and between marks that a normaliser may put it before.

Together they distinguish every class of characters that a known pattern knows (letters of each
case, marks, digits, spaces, punctuation, what is none of these, what folds into a contraction), so
encoders that split all of them alike put the character in the same class.
"""

ASCII_TEXTS = tuple(map("".join, product("\n\r\t '(1As", repeat=4)))
"""Every row of four characters that patterns, digits' and punctuation's steps distinguish."""

_LAST_BYTES = [bytes([byte]) for byte in range(0x80, 0xC0)]
_FIRST_BYTES = [bytes([byte]) for byte in range(0xC2, 0xF5)]


def show_splits(definition: Definition) -> Definition | None:
    """Return the copy of a byte-level BPE, None for other models: gigatoken splits none of theirs.

    Equal ids of a text made of `CONTEXT` mean equal splits and equal normalised text.
    """
    return _copy(definition, {part for line in CONTEXT.split("\n") for part in _joined(line)})


def show_ascii_splits(definition: Definition) -> Definition | None:
    """Return the copy whose ids show every split of `ASCII_TEXTS`, None as `show_splits` does."""
    return _copy(definition, {part for text in ASCII_TEXTS for part in _parts(text.encode())})


def _copy(definition: Definition, joined: Iterable[bytes]) -> Definition | None:
    if definition["model"]["type"] != "BPE" or not is_byte_level(definition):
        return None
    steps = list(pre_tokenizer_steps(definition))
    for step in steps:  # said in more than one way, and without effect on ids
        if step["type"] == "ByteLevel":
            step["trim_offsets"] = False
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": definition.get("normalizer"),
        "pre_tokenizer": _sequence(steps),
        "model": _model(sorted(joined, key=lambda piece: (len(piece), piece))),
    }


def _sequence(steps: Sequence[Definition]) -> Definition | None:
    """Return steps as one; gigatoken (0.10) reads a single `ByteLevel` only on its own."""
    if len(steps) > 1:
        return {"type": "Sequence", "pretokenizers": steps}
    return steps[0] if steps else None


def _model(joined: Sequence[bytes]) -> Definition:
    """Return a BPE of single bytes and of whatever may be side by side, made by any merge."""
    pieces = [*(bytes([byte]) for byte in range(256)), *joined]
    known = set(pieces)
    merges = [
        [write_byte_level(piece[:cut]), write_byte_level(piece[cut:])]
        for piece in joined
        for cut in range(1, len(piece))
        if {piece[:cut], piece[cut:]} <= known
    ]
    vocabulary = {write_byte_level(piece): place for place, piece in enumerate(pieces)}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges}


def _joined(line: str) -> Iterator[bytes]:
    """Yield all parts of more than one byte of what is between a line's characters.

    A character beyond ASCII gives its last byte to what follows it, and its first to what it
    follows: within it nothing is merged, so what is on both sides never overlaps.
    """
    between = re.split(r"\{0\}|[^\0-\x7f]", line)
    for place, ascii_part in enumerate(between):
        lefts = _LAST_BYTES if place > 0 else [b""]
        rights = _FIRST_BYTES if place < len(between) - 1 else [b""]
        for left in lefts:
            for right in rights:
                yield from _parts(left + ascii_part.encode() + right)


def _parts(whole: bytes) -> Iterator[bytes]:
    """Yield the parts of more than one byte."""
    for start in range(len(whole)):
        for end in range(start + 2, len(whole) + 1):
            yield whole[start:end]
