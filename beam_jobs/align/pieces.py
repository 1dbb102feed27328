"""Input files, and the pieces in which they are read.

A *piece* is what one worker reads without help: a file, a range of bytes of a large JSON lines
file, or some row groups of a parquet file. Small pieces travel together in one *task*. Nothing
downstream depends on where pieces end: a document is named by its file and its place in it.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

TASK_BYTES = 64 << 20
"""Input bytes of one task, where files can be cut or put together to reach it."""

SAMPLE_BYTES_PER_TEXT_BYTE = 3
"""Tar bytes per byte of text: 9 to 10 bytes per student token of 3 to 4 bytes."""

_EXPANSION = {"none": 1.0, "gzip": 4.0, "zstd": 4.0, "bzip2": 4.5, "xz": 5.0, "parquet": 3.0}


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus.

    Attributes:
        path: where it is on this machine or in the object store.
        source: its name in ids and dead letters, relative to the fixed part of its glob, and so
            the same on every machine.
        num_bytes: its size.
        format: "jsonl", "json" (values, not lines), "text", "csv", "tsv", "parquet" or "arrow".
        compression: "none", "gzip", "zstd", "bzip2" or "xz".
        modified: when it was last written, in nanoseconds since 1970; 0 in an object store.
        content: digest of samples of its bytes, or an object store's checksum; "" where unknown.
        row_group_bytes: uncompressed bytes of a parquet file's row groups; empty where the file
            is no parquet or its footer is unreadable.
    """

    path: str
    source: str
    num_bytes: int
    format: str
    compression: str
    modified: int = 0
    content: str = ""
    row_group_bytes: tuple[int, ...] = ()

    @property
    def estimated_text_bytes(self) -> float:
        """Roughly how much text it holds; compressed files are taken to expand 3 to 5 times."""
        return self.num_bytes * _EXPANSION.get(self.format, _EXPANSION[self.compression])


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes [start, end) of JSON lines, row groups [start, end) of parquet.

    A piece of JSON lines owns the lines that begin in its range. `end` is None where the rest of
    the file belongs to it. `num_bytes`, `modified` and `content` are the whole file's when the job
    was planned, so that a change while it runs is noticed; `num_bytes` is -1 where nobody asked.
    """

    path: str
    source: str
    format: str
    compression: str
    start: int = 0
    end: int | None = None
    num_bytes: int = -1
    modified: int = 0
    content: str = ""


def count_buckets(files: Sequence[InputFile], *, shard_bytes: int, keep_text: bool) -> int:
    """Return into how many buckets the corpus is hashed, so that each fills about one shard.

    Example:
        >>> count_buckets(files_of_1_gb, shard_bytes=256 << 20, keep_text=False)
        12
    """
    text_bytes = sum(file.estimated_text_bytes for file in files)
    factor = SAMPLE_BYTES_PER_TEXT_BYTE + (1 if keep_text else 0)
    return max(1, math.ceil(text_bytes * factor / shard_bytes))


def plan_tasks(files: Sequence[InputFile], *, task_bytes: int = TASK_BYTES) -> list[str]:
    """Return the reading tasks, each the JSON of a list of pieces; see `decode_task`."""
    tasks: list[list[Piece]] = []
    room = 0.0
    for piece, num_bytes in cut_files(files, task_bytes=task_bytes):
        if not tasks or num_bytes > room:
            tasks.append([])
            room = task_bytes
        tasks[-1].append(piece)
        room -= num_bytes
    return [json.dumps([asdict(piece) for piece in task]) for task in tasks]


def decode_task(task: str) -> list[Piece]:
    """Return the pieces of a task."""
    return [Piece(**piece) for piece in json.loads(task)]


def cut_files(
    files: Sequence[InputFile], *, task_bytes: int = TASK_BYTES
) -> Iterator[tuple[Piece, float]]:
    """Yield the pieces in which files are read, and about how many bytes of text each holds."""
    for file in files:
        if file.format == "parquet" and file.row_group_bytes:
            yield from _row_group_pieces(file, task_bytes)
        elif file.format == "jsonl" and file.compression == "none" and file.num_bytes > task_bytes:
            for start in range(0, file.num_bytes, task_bytes):
                end = min(start + task_bytes, file.num_bytes)
                yield _piece(file, start, end), end - start
        else:
            yield _piece(file), file.estimated_text_bytes


def _row_group_pieces(file: InputFile, task_bytes: int) -> Iterator[tuple[Piece, float]]:
    start, size = 0, 0
    for index, num_bytes in enumerate(file.row_group_bytes):
        if size and size + num_bytes > task_bytes:
            yield _piece(file, start, index), size
            start, size = index, 0
        size += num_bytes
    yield _piece(file, start, len(file.row_group_bytes)), size


def _piece(file: InputFile, start: int = 0, end: int | None = None) -> Piece:
    return Piece(
        file.path,
        file.source,
        file.format,
        file.compression,
        start,
        end,
        file.num_bytes,
        file.modified,
        file.content,
    )
