"""Both encoders compared on every character: on a tokenizer's own ids, and on its splits.

A tokenizer's own ids hide most splits: where no merge spans a place, it makes no difference
whether the text is divided there. `show_splits` makes a copy that normalises and splits as the
tokenizer does, and whose model merges what `CONTEXT` puts side by side and no split keeps apart.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from itertools import product

import numpy as np
import orjson
from numpy.typing import NDArray

from pipeline.tokenization.backends import FastEncoder, LibraryError, Reference, load_reference
from pipeline.tokenization.contents import write_byte_level
from pipeline.tokenization.definition import Definition, is_byte_level, pre_tokenizer_steps
from pipeline.tokenization.ranks import merges_of
from pipeline.tokenization.sources import Kind, TokenizerFile
from pipeline.tokenization.sweep import (
    IDS_CONTEXT,
    DifferingCharacters,
    SameTokens,
    find_differing,
    remembered_differing,
)

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
_LIBRARIES = {"huggingface": "tokenizers", "sentencepiece": "sentencepiece"}


def differing_characters(
    file: TokenizerFile, special_strings: str, reference: Reference, encoder: FastEncoder
) -> DifferingCharacters:
    """Return the characters on which a tokenizer's encoders differ: known, remembered or found."""
    key = f"ids {sha256(file.data).hexdigest()} {special_strings} {_versions(file.kind)}"
    compare = partial(same_ids, reference, encoder)
    of_ids = remembered_differing(key, partial(find_differing, compare, IDS_CONTEXT))
    copy = show_splits(file.definition) if file.definition else None
    return of_ids if copy is None else of_ids | differing_splits(copy)


def differing_splits(copy: Definition) -> DifferingCharacters:
    """Return the characters around which encoders split texts in different places.

    A `copy` is what `show_splits` gives; tokenizers of one kind share it, and what is found.
    """
    data = orjson.dumps(copy, option=orjson.OPT_SORT_KEYS)
    key = f"splits {sha256(data).hexdigest()} {_versions('huggingface')}"
    return remembered_differing(key, partial(_find_differing_splits, copy))


def splits_ascii_alike(definition: Definition) -> bool:
    """Return whether both encoders split ASCII texts in the same places.

    gigatoken (0.10) recognises a pattern by its text and ignores what is next to it: steps for
    digits or punctuation, the pattern's behaviour, a prefix space. Own ids may hide that in probes.
    """
    steps = [definition.get("normalizer"), definition.get("pre_tokenizer")]
    data = orjson.dumps(steps, option=orjson.OPT_SORT_KEYS)
    key = f"ASCII {sha256(data).hexdigest()} {_versions('huggingface')}"
    return not remembered_differing(key, partial(_find_ascii_splits, definition))


def same_ids(reference: Reference, encoder: FastEncoder, texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return for which texts both give the same ids, bool [D]; none if a library fails."""
    try:
        input_ids, cu_tokens = encoder.encode_batch([text.encode() for text in texts])
        slow = reference.encode_batch(texts)
    except LibraryError:  # it doesn't say on which, and gives nothing for the others
        if len(texts) == 1:
            return np.zeros(1, np.bool_)
        return np.concatenate([same_ids(reference, encoder, [text]) for text in texts])
    fast = np.split(input_ids, cu_tokens[1:-1])
    return np.array([np.array_equal(a, b.ids) for a, b in zip(fast, slow, strict=True)], np.bool_)


def _versions(kind: Kind) -> str:
    """Return the versions of the two libraries that are compared."""
    return f"{version('gigatoken')} {version(_LIBRARIES[kind])}"


def _find_differing_splits(copy: Definition) -> DifferingCharacters:
    return find_differing(_same_ids_of(copy), CONTEXT)


def _find_ascii_splits(definition: Definition) -> DifferingCharacters:
    """Return all of ASCII if any text differs: a class of characters can't be left out."""
    copy = show_ascii_splits(definition)
    alike = copy is None or _same_ids_of(copy)(ASCII_TEXTS).all()
    return DifferingCharacters(() if alike else ((0, 0x80),))


def _same_ids_of(copy: Definition) -> SameTokens:
    file = TokenizerFile("a copy that shows splits", "huggingface", b"", copy)
    reference = load_reference(file, honour_special=True, proven=False)
    return partial(same_ids, reference, FastEncoder(file, reference))


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
    vocabulary = {write_byte_level(piece): place for place, piece in enumerate(pieces)}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges_of(vocabulary)}


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
