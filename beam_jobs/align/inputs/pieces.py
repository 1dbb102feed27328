"""Input files, and the pieces in which they are read.

A *piece* is what one worker reads without help: a file, a range of bytes of a large JSON lines
file, some row groups of a parquet file, or some documents of a dataset's shard. Small pieces travel
together in one *task*. Nothing downstream depends on where pieces end: a document is named by its
file and its place in it.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

TASK_BYTES = 64 << 20
"""Input bytes of one task, where files can be cut or put together to reach it."""

DATASET = "dataset"
"""The format of a dataset's shards; their documents are read, and aligned anew."""

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
        num_bytes: its size; of a dataset's shard, the UTF-8 bytes of the texts that are read.
        format: "jsonl", "json" (values, not lines), "text", "csv", "tsv", "parquet", "arrow" or
            "dataset", which is one of a dataset's shards.
        compression: "none", "gzip", "zstd", "bzip2" or "xz".
        modified: when it was last written, in nanoseconds since 1970; 0 in an object store.
        content: digest of samples of its bytes, or an object store's checksum; "" where unknown.
        row_group_bytes: uncompressed bytes of a parquet file's row groups; empty where the file
            is no parquet or its footer is unreadable.
        num_documents: in a dataset's shard, read or not; 0 of other files.
        chosen: which of them are read, see `beam_jobs.align.inputs.datasets`; "": all.
    """

    path: str
    source: str
    num_bytes: int
    format: str
    compression: str
    modified: int = 0
    content: str = ""
    row_group_bytes: tuple[int, ...] = ()
    num_documents: int = 0
    chosen: str = ""

    @property
    def estimated_text_bytes(self) -> float:
        """Roughly how much text it holds; compressed files are taken to expand 3 to 5 times."""
        return self.num_bytes * _EXPANSION.get(self.format, _EXPANSION[self.compression])


@dataclass(frozen=True)
class Piece:
    """Part of a file, [start, end) in bytes of JSON lines, row groups or a shard's documents.

    A piece of JSON lines owns the lines that begin in its range. `end` is None where the rest of
    the file belongs to it. `num_bytes`, `modified` and `content` are the whole file's when the job
    was planned, so that a change while it runs is noticed; `num_bytes` is -1 where nobody asked.
    Of a shard `content` is its dataset's fingerprint, and `chosen` the file's.
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
    chosen: str = ""


def count_buckets(files: Sequence[InputFile], *, shard_bytes: int, keep_text: bool) -> int:
    """Return into how many buckets the corpus is hashed, so that each fills about one shard.

    Example:
        >>> count_buckets(files_of_1_gb, shard_bytes=256 << 20, keep_text=False)
        12
    """
    text_bytes = sum(file.estimated_text_bytes for file in files)
    return buckets_for(text_bytes, shard_bytes=shard_bytes, keep_text=keep_text)


def buckets_for(text_bytes: float, *, shard_bytes: int, keep_text: bool) -> int:
    """Return how many buckets some bytes of text fill."""
    return max(1, math.ceil(text_bytes * sample_bytes(keep_text=keep_text) / shard_bytes))


def sample_bytes(*, keep_text: bool) -> int:
    """Return how many bytes of a tar a byte of text is taken for."""
    return SAMPLE_BYTES_PER_TEXT_BYTE + (1 if keep_text else 0)


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
        elif file.format == DATASET:
            yield from _document_pieces(file, task_bytes)
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


def _document_pieces(file: InputFile, task_bytes: int) -> Iterator[tuple[Piece, float]]:
    total = max(1, math.ceil(file.num_bytes / task_bytes))
    for part in range(total):
        start, end = (file.num_documents * number // total for number in (part, part + 1))
        piece = Piece(file.path, file.source, DATASET, "none", start, end)
        yield replace(piece, content=file.content, chosen=file.chosen), file.num_bytes / total


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
