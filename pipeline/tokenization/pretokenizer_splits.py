"""Check that both encoders split texts in the same places, once per way of splitting.

`fastokens` splits with other engines and Unicode tables. Ids hide splits that no merge spans. So
both encode with a copy whose model, a BPE of bytes, merges everything that no split keeps apart.
"""

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import batched, chain, product
from pathlib import Path

import numpy as np
import orjson

from pipeline.remote.user_cache import cache_folder, keep
from pipeline.tokenization.backends import UNLIKE, FastEncoder, HuggingFaceReference
from pipeline.tokenization.contents import write_byte_level
from pipeline.tokenization.definition import (
    Definition,
    is_byte_level,
    normalizer_steps,
    pre_tokenizer_steps,
)
from pipeline.tokenization.rank_files import merges_of
from pipeline.tokenization.sources import TokenizerFile

CONTEXT = "\n  {0}Aa\n一{0}一\na'{0}a\n!!{0}1\ne\u0301{0}\u0334"
"""A character after spaces and before capitals, between ideographs, where a contraction may end,
between punctuation and a digit, and between marks that a normaliser may put it before.

Together they distinguish every class of characters that a known pattern knows (letters of each
case, marks, digits, spaces, punctuation, what is none of these, what folds into a contraction), so
encoders that split all of them alike put the character in the same class.
"""

ASCII_TEXTS = tuple(map("".join, product("\n\r\t '(1As", repeat=4)))
"""Every row of four characters that patterns, digits' and punctuation's steps distinguish."""

TRIED = ((0x80, 0xD800), (0xE000, 0x33480), (0xE0000, 0xE01F0))
"""All code points that are assigned, could be in a library's tables, or are private in the first
plane. Other planes have no characters: one code point in `STRIDE` is tried for its neighbours."""

EMPTY_PLANES = ((0x33480, 0xE0000), (0xE01F0, 0x110000))
STRIDE = 1024

KNOWN_SPLITS = Path(__file__).with_name("known_splits.json")
"""Hashes of ways to split that are known to be alike, with the libraries' versions that were
compared, so that a first run needs no comparison; `tests/support/compare_splits.py` makes it."""

_GROUP = 64
"""Characters that are tried in one text."""

_AT_ONCE = 256
"""Texts."""

_LAST_BYTES = [bytes([byte]) for byte in range(0x80, 0xC0)]
_FIRST_BYTES = [bytes([byte]) for byte in range(0xC2, 0xF5)]
logger = logging.getLogger(__name__)


def why_unlike(definition: Definition) -> str | None:
    """Say where the encoders split texts differently, None if nowhere.

    Takes seconds, unless cached for the user or known to the package.
    """
    copy = show_splits(definition)
    if copy is None:
        if _without_tables(definition):
            return None
        return "its steps need tables of characters, and nothing shows where they split texts"
    name = name_of(copy)
    if name in known_splits():
        return None
    path = cache_folder("fast-path") / f"{name}.json"
    try:
        kept: str | None = json.loads(path.read_bytes())["differs"]
    except (OSError, ValueError, KeyError, TypeError):
        kept = find_difference(definition)
        keep(path, json.dumps({"differs": kept}))
    return kept


def find_difference(definition: Definition) -> str | None:
    """Describe the first text or character that is split differently."""
    ascii_parts = chain(*(_parts(text.encode()) for text in ASCII_TEXTS))
    found = _first_unlike(_copy(definition, ascii_parts), ASCII_TEXTS)
    if found is not None:
        return f"the text {ASCII_TEXTS[found]!r} is split elsewhere than by the reference"
    start = time.monotonic()
    logger.info("comparing encoders on every character, once for this way to split texts")
    characters = [c for c in map(chr, chain(*_tried())) if c not in UNLIKE]
    groups = list(batched(characters, _GROUP))
    texts = ["".join(CONTEXT.replace("{0}", character) for character in group) for group in groups]
    found = _first_unlike(_copy(definition, _context_parts()), texts)
    if found is not None:
        place = f"U+{ord(groups[found][0]):04X} …"
        return f"texts are split around {place} elsewhere than by the reference"
    logger.info("no difference, in %.1f s", time.monotonic() - start)
    return None


def name_of(copy: Definition) -> str:
    """Name a copy's cached result; it depends on the libraries' versions."""
    data = orjson.dumps(copy, option=orjson.OPT_SORT_KEYS)
    return sha256(" ".join((sha256(data).hexdigest(), *library_versions())).encode()).hexdigest()


@cache
def known_splits() -> frozenset[str]:
    """Names of copies that are known to be split alike."""
    return frozenset(json.loads(KNOWN_SPLITS.read_bytes()))


def library_versions() -> tuple[str, ...]:
    """Versions of the encoding libraries."""
    return tuple(map(version, ("fastokens", "sentencepiece", "tokenizers")))


def show_splits(definition: Definition) -> Definition | None:
    """Return the copy of a byte-level BPE, None for other models."""
    if definition["model"]["type"] != "BPE" or not is_byte_level(definition):
        return None
    return _copy(definition, _context_parts())


def _copy(definition: Definition, joined: Iterable[bytes]) -> Definition:
    """Return a copy that merges the byte strings in `joined`."""
    steps = list(pre_tokenizer_steps(definition))
    for step in steps:  # written in several ways, without effect on ids
        if step["type"] == "ByteLevel":
            step["trim_offsets"] = False
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": definition.get("normalizer"),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": _model(sorted(set(joined), key=lambda piece: (len(piece), piece))),
    }


def _first_unlike(copy: Definition, texts: Sequence[str]) -> int | None:
    file = TokenizerFile("a copy that shows splits", "huggingface", b"", copy)
    reference = HuggingFaceReference(file, honour_special=True, proven=True)
    encoder = FastEncoder(file, reference)
    for first in range(0, len(texts), _AT_ONCE):
        some = texts[first : first + _AT_ONCE]
        input_ids, cu_tokens, _ = encoder.encode_batch(some)
        own = np.split(input_ids, cu_tokens[1:-1])
        for place, (ids, encoded) in enumerate(zip(own, reference.encode_batch(some), strict=True)):
            if not np.array_equal(ids, encoded.ids):
                return first + place
    return None


def _tried() -> Iterator[range]:
    yield from (range(start, end) for start, end in TRIED)
    yield from (range(start, end, STRIDE) for start, end in EMPTY_PLANES)


def _without_tables(definition: Definition) -> bool:
    """Whether each step only adds, replaces or splits at strings."""
    steps = [*normalizer_steps(definition), *pre_tokenizer_steps(definition)]
    return all(
        step["type"] in ("Prepend", "Metaspace") or "String" in (step.get("pattern") or {})
        for step in steps
    )


def _model(joined: Sequence[bytes]) -> Definition:
    pieces = [*(bytes([byte]) for byte in range(256)), *joined]
    vocabulary = {write_byte_level(piece): place for place, piece in enumerate(pieces)}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges_of(vocabulary)}


def _context_parts() -> Iterator[bytes]:
    """Yield all parts of the strings between a line's characters.

    A character beyond ASCII gives its last byte to the string after it, its first to the one
    before.
    """
    for line in CONTEXT.split("\n"):
        between = re.split(r"\{0\}|[^\0-\x7f]", line)
        for place, ascii_part in enumerate(between):
            lefts = _LAST_BYTES if place > 0 else [b""]
            rights = _FIRST_BYTES if place < len(between) - 1 else [b""]
            for left, right in product(lefts, rights):
                yield from _parts(left + ascii_part.encode() + right)


def _parts(whole: bytes) -> Iterator[bytes]:
    for start in range(len(whole)):
        for end in range(start + 2, len(whole) + 1):
            yield whole[start:end]
