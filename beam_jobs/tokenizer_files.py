"""A dataset's copies of both tokenizers."""

import os
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from beam_jobs import storage
from pipeline.recent import Recent
from pipeline.tokenization import SpecialStrings, Tokenizer, load_tokenizer
from pipeline.tokenization.pretokenizer_splits import library_versions
from schemas.errors import ForeignTokenizerError


@dataclass(frozen=True)
class StoredTokenizer:
    """A tokenizer's copy. `fast` holds for these `versions`; workers with others check again."""

    path: str
    sha256: str
    special_strings: SpecialStrings
    fast: bool
    versions: tuple[str, ...]


_KEPT = 4
"""Tokenizers that a process keeps, 40 to 400 MB each: those of two alternating jobs."""

_lock = threading.Lock()
_loaded: Recent[StoredTokenizer, Tokenizer] = Recent(_KEPT)


def store_tokenizer(tokenizer: Tokenizer, path: str, *, scratch: str) -> StoredTokenizer:
    """Copy a tokenizer's file into the dataset; keep it loaded here."""
    folder = os.path.dirname(path)
    storage.make_folder(folder)
    if storage.num_bytes_of(path) != len(tokenizer.file_bytes):
        storage.write_atomically(path, tokenizer.file_bytes, scratch=scratch)
    stored = StoredTokenizer(
        path, tokenizer.sha256, tokenizer.special_strings, tokenizer.fast, library_versions()
    )
    with _lock:
        _loaded.get(stored, lambda: tokenizer)
    return stored


def load_stored(stored: StoredTokenizer) -> Tokenizer:
    """Return a tokenizer, loaded once; ForeignTokenizerError if its file was replaced."""
    with _lock:
        return _loaded.get(stored, partial(_load, stored))


def _load(stored: StoredTokenizer) -> Tokenizer:
    data = storage.read_bytes(stored.path)
    found = sha256(data).hexdigest()
    if found != stored.sha256:
        raise ForeignTokenizerError(
            f"{stored.path} has SHA-256 {found[:16]}…, the job started with {stored.sha256[:16]}…: "
            "it was replaced while the job ran; run the same command again"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, os.path.basename(stored.path))
        path.write_bytes(data)
        return load_tokenizer(
            str(path),
            special_strings=stored.special_strings,
            fast=stored.fast,
            proven=stored.versions == library_versions(),
        )
