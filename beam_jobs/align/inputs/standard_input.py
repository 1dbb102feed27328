"""`--input -`: standard input, kept in a file beside the dataset while the job runs.

A job seeks in its input, reads it in several processes, and reads it again to resume; a pipe can do
none of that.
"""

import fcntl
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

from beam_jobs import storage
from beam_jobs.align.inputs.listing import InputError

STANDARD_INPUT = "-"
SPOOL_PREFIX = ".vocag-stdin-"

_CHUNK_BYTES = 1 << 20
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ": ".xz"}
_FORMAT_MAGIC = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
_SUFFIXES = {"text": ".txt"}
_LOCK = "lock"


@contextmanager
def spool_standard_input(
    patterns: tuple[str, ...], output: str, *, format: str | None
) -> Iterator[tuple[str, ...]]:
    """Put the path of a copy in the place of `-`; the copy goes when the job has ended.

    Args:
        patterns: the input, `-` among it or not.
        output: the dataset's folder, where the copy is kept.
        format: what the documents are, None to go by the first bytes and else take JSON lines.

    Raises:
        InputError: standard input is a terminal, empty, or named twice.

    Example:
        >>> with spool_standard_input(("-",), "aligned", format=None) as patterns:  # doctest: +SKIP
        ...     align(replace(options, input=patterns))
    """
    if STANDARD_INPUT not in patterns:
        yield patterns
        return
    if patterns.count(STANDARD_INPUT) > 1:
        raise InputError("--input - is given twice: standard input can be read once")
    if sys.stdin.isatty():
        raise InputError(
            "--input - reads documents from standard input, which is a terminal: pipe them in, "
            "such as zcat corpus.jsonl.gz | vocag align --input - …"
        )
    with ExitStack() as stack:
        folder = storage.join(output, f"{SPOOL_PREFIX}{uuid.uuid4().hex}")
        stack.callback(storage.remove_folder, folder)
        if storage.is_local(output):
            _remove_abandoned(output)
            storage.make_folder(folder)
            lock = stack.enter_context(open(os.path.join(folder, _LOCK), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        path = _copy(sys.stdin.buffer, folder, format)
        yield tuple(path if pattern == STANDARD_INPUT else pattern for pattern in patterns)


def is_spooled(path: str) -> bool:
    """Return whether a path is of a copy of standard input."""
    return f"/{SPOOL_PREFIX}" in path


def _copy(stream: BinaryIO, folder: str, format: str | None) -> str:
    head = stream.read(_CHUNK_BYTES)
    if not head:
        raise InputError("--input -: standard input is empty; does the command before it work?")
    suffix = next((s for magic, s in _MAGIC.items() if head.startswith(magic)), "")
    kind = next((s for magic, s in _FORMAT_MAGIC.items() if head.startswith(magic)), ".jsonl")
    if format is not None:
        kind = _SUFFIXES.get(format, f".{format}")
    path = storage.join(folder, f"stdin{kind}{suffix}")
    with storage.open_to_write(path) as file:
        while head:
            file.write(head)
            head = stream.read(_CHUNK_BYTES)
    return path


def _remove_abandoned(output: str) -> None:
    """Remove the copies of jobs that were killed: nobody holds their locks."""
    if not os.path.isdir(output):
        return
    for entry in os.scandir(output):
        if not entry.name.startswith(SPOOL_PREFIX):
            continue
        try:
            with open(os.path.join(entry.path, _LOCK), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass  # killed before it made its lock
        except BlockingIOError:
            continue
        shutil.rmtree(entry.path, ignore_errors=True)
