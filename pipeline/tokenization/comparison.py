"""Both encoders compared on every character: on a tokenizer's own ids, and on its splits."""

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version

import numpy as np
import orjson
from numpy.typing import NDArray

from pipeline.tokenization.backends import FastEncoder, LibraryError, Reference, load_reference
from pipeline.tokenization.definition import Definition
from pipeline.tokenization.sources import Kind, TokenizerFile
from pipeline.tokenization.sweep import (
    IDS_CONTEXT,
    DifferingCharacters,
    SameTokens,
    find_differing,
    remembered_differing,
)
from pipeline.tokenization.visible_splits import (
    ASCII_TEXTS,
    CONTEXT,
    show_ascii_splits,
    show_splits,
)

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

    Args:
        copy: what `show_splits` gives; tokenizers of one kind share it, and what is found.
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
