"""A dataset's tokenizers, and the texts spelled by their tokens."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pipeline.dataset.dataset_reading import read_whole
from pipeline.dataset.files import Dataset
from pipeline.tokenization import Tokenizer, load_tokenizer
from schemas.document import AlignedDocument, Tokens
from schemas.errors import ForeignTokenizerError
from schemas.manifest import TokenizerRecord

Side = Literal["student", "teacher"]


def load_dataset_tokenizer(dataset: Dataset, side: Side) -> Tokenizer:
    """Load a dataset's own copy of a tokenizer, on the reference path, once per process.

    ForeignTokenizerError if it was altered; TokenizerError if it isn't a tokenizer.
    """
    return _load(dataset.location, getattr(dataset.manifest, side))


@lru_cache(maxsize=2)
def _load(folder: str, record: TokenizerRecord) -> Tokenizer:
    url = f"{folder}/{record.file}"
    data = read_whole(url)
    found = sha256(data).hexdigest()
    if found != record.sha256:
        raise ForeignTokenizerError(
            f"{url} has SHA-256 {found[:16]}…, the manifest says {record.sha256[:16]}…: restore "
            f'the copy of "{record.source}"'
        )
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, Path(record.file).name)
        copy.write_bytes(data)
        own = load_tokenizer(str(copy), special_strings=record.special_strings, fast=False)
    own.source = record.source  # the copy is gone
    return own


def find_text(
    document: AlignedDocument, tokenizers: Mapping[str, Callable[[], Tokenizer]]
) -> bytes | None:
    """Return a document's text in UTF-8: kept, or spelled by its tokens with the sample's SHA-256.

    `tokenizers` load by side, if needed.
    """
    if document.text is not None:
        return document.text
    for side, load in tokenizers.items():
        tokens: Tokens = getattr(document, side)
        text = load().spell_text(tokens.input_ids, tokens.byte_offsets, document.num_text_bytes)
        if text is not None and sha256(text).hexdigest() == document.text_sha256:
            return text
    return None


def text_in(dataset: Dataset, document: AlignedDocument) -> bytes | None:
    """Return a document's text as `find_text` does."""
    sides: tuple[Side, Side] = ("student", "teacher")
    load: dict[str, Callable[[], Tokenizer]] = {
        side: partial(load_dataset_tokenizer, dataset, side) for side in sides
    }
    return find_text(document, load)
