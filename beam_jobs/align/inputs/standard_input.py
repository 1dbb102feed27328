"""`--input -`: standard input, copied next to the dataset while the job runs.

A job seeks and rereads, which pipes don't allow.
"""

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import BinaryIO

from beam_jobs import storage
from beam_jobs.align.inputs.formats import format_of_bytes
from beam_jobs.align.inputs.parts import STANDARD_INPUT
from beam_jobs.first_bytes import compression_of
from beam_jobs.job_errors import InputError
from pipeline.command_line.failures import naming

SPOOL_PREFIX = ".vocag-stdin-"

_CHUNK_BYTES = 1 << 20
_SUFFIXES = {"gzip": ".gz", "zstd": ".zst", "bzip2": ".bz2", "xz": ".xz"}


@contextmanager
def spool_standard_input(
    patterns: tuple[str, ...], output: str, *, format: str | None
) -> Iterator[tuple[str, ...]]:
    """Replace `-` with the path of a copy, removed when the job ends.

    Without `format`, first bytes decide. InputError if standard input is a terminal, empty, or
    named twice.
    """
    if STANDARD_INPUT not in patterns:
        yield patterns
        return
    if patterns.count(STANDARD_INPUT) > 1:
        raise InputError("--input - is given twice: standard input can be read once")
    if sys.stdin and sys.stdin.isatty():  # None if it is closed
        raise InputError(
            "--input - reads documents from standard input, which is a terminal: pipe them in, "
            "such as zcat corpus.jsonl.gz | vocag align --input - …"
        )
    folder = storage.join(output, f"{SPOOL_PREFIX}{uuid.uuid4().hex}")
    try:
        storage.make_folder(folder)
        path = _copy(sys.stdin.buffer if sys.stdin else BytesIO(), folder, format)
        yield tuple(path if pattern == STANDARD_INPUT else pattern for pattern in patterns)
    finally:
        storage.remove_folder(folder)


def remove_abandoned(output: str, patterns: tuple[str, ...]) -> None:
    """Remove copies that killed jobs left."""
    for folder in storage.list_folders(output, SPOOL_PREFIX):
        if not any(pattern.startswith(folder) for pattern in patterns):
            storage.remove_folder(folder)


def is_spooled(path: str) -> bool:
    """Whether a path is a copy of standard input."""
    return f"/{SPOOL_PREFIX}" in path


def _copy(stream: BinaryIO, folder: str, format: str | None) -> str:
    head = stream.read(_CHUNK_BYTES)
    if not head:
        raise InputError("--input -: standard input is empty; does the command before it work?")
    suffix = _SUFFIXES.get(compression_of(head) or "", "")
    kind = f".{format_of_bytes(head) or 'jsonl'}"
    if format is not None:
        kind = ".txt" if format == "text" else f".{format}"
    path = storage.join(folder, f"stdin{kind}{suffix}")
    with naming(path), storage.open_to_write(path) as file:
        while head:
            file.write(head)
            head = stream.read(_CHUNK_BYTES)
    return path
