"""The tokenizers that a dataset carries with it: `tokenizers/student`, `tokenizers/teacher`."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec

from pipeline.dataset.files import Dataset
from pipeline.tokenization import Tokenizer, load_tokenizer
from schemas.errors import ForeignTokenizerError
from schemas.manifest import TokenizerRecord


@dataclass(frozen=True)
class DatasetTokenizers:
    """Both tokenizers of a dataset, on the reference path."""

    student: Tokenizer
    teacher: Tokenizer


def load_dataset_tokenizers(dataset: Dataset) -> DatasetTokenizers:
    """Load a dataset's own copies of its tokenizers, once per process.

    Raises:
        ForeignTokenizerError: a copy is not the file that the manifest names.
        TokenizerError: a copy is no tokenizer.
        OSError: a copy can't be read.

    Example:
        >>> load_dataset_tokenizers(open_dataset("aligned")).student.token_bytes(278)
        b' the'
    """
    return DatasetTokenizers(
        load_dataset_tokenizer(dataset.location, dataset.manifest.student),
        load_dataset_tokenizer(dataset.location, dataset.manifest.teacher),
    )


@lru_cache(maxsize=2)
def load_dataset_tokenizer(folder: str, record: TokenizerRecord) -> Tokenizer:
    """Load one of them, see `load_dataset_tokenizers`."""
    url = f"{folder}/{record.file}"
    with fsspec.open(url, "rb") as file:
        data: bytes = file.read()
    found = sha256(data).hexdigest()
    if found != record.sha256:
        raise ForeignTokenizerError(
            f"{url} has SHA-256 {found[:16]}…, the manifest says {record.sha256[:16]}…: restore "
            f'the copy of "{record.source}"'
        )
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, Path(record.file).name)
        copy.write_bytes(data)
        return load_tokenizer(str(copy), special_strings=record.special_strings, fast=False)
