"""Input files, and the parts in which they are read.

A *part* is what one worker reads alone: a file, bytes of a large JSON lines file, row groups of a
parquet file, or documents of a dataset's shard. Small parts share a *task*.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from beam_jobs.align.inputs.formats import FORMATS

TASK_BYTES = 64 << 20
"""Input bytes of one task, if files can be cut or combined to reach it."""

STANDARD_INPUT = "-"
"""For `--input`."""

DATASET = "dataset"
"""The format of a dataset's shards, which are aligned anew."""

SAMPLE_BYTES_PER_TEXT_BYTE = 3
"""Tar bytes per byte of text: 8.9 per student token of 3 to 4 bytes, and 1.4 kB per document."""

_EXPANSION = {"none": 1.0, "gzip": 4.0, "zstd": 4.0, "bzip2": 4.5, "xz": 5.0}


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus.

    Attributes:
        path: on this machine or in the object store.
        source: name in ids and dead letters, relative to its glob's fixed part.
        num_bytes: its size; of a dataset's shard, the UTF-8 bytes of chosen texts.
        format: a name of `formats.FORMATS`.
        compression: "none", "gzip", "zstd", "bzip2" or "xz".
        modified: time of writing, in nanoseconds since 1970; 0 in an object store.
        content: see `content_of`; of a shard its dataset's fingerprint.
        row_group_bytes: uncompressed, of a parquet file; empty if its footer is unreadable.
        num_documents: in a dataset's shard, chosen or not; else 0.
        chosen: encoded choice, "" for all.
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
        """Rough size of its text, uncompressed."""
        known = FORMATS.get(self.format)  # ids of a dataset have no file's format
        own = known.expansion if known else None
        return self.num_bytes * (own or 1.0) * _EXPANSION[self.compression]


@dataclass(frozen=True)
class InputPart:
    """[start, end) of a file, in bytes of JSON lines, row groups or a shard's documents.

    Lines belong to the part in which they begin; `end` None is the file's.
    """

    file: InputFile
    start: int = 0
    end: int | None = None


def count_buckets(text_bytes: float, *, shard_bytes: int, keep_text: bool) -> int:
    """Number of buckets, each of about one shard."""
    sample_bytes = text_bytes * (SAMPLE_BYTES_PER_TEXT_BYTE + keep_text)
    return max(1, math.ceil(sample_bytes / shard_bytes))


def plan_tasks(files: Sequence[InputFile], *, task_bytes: int = TASK_BYTES) -> list[str]:
    """Group parts into tasks, JSON for `decode_task`."""
    tasks: list[list[InputPart]] = []
    room = 0.0
    for part, num_bytes in cut_files(files, task_bytes=task_bytes):
        if not tasks or num_bytes > room:
            tasks.append([])
            room = task_bytes
        tasks[-1].append(part)
        room -= num_bytes
    # The standard library writes a path of bytes that aren't UTF-8, which msgspec refuses.
    return [json.dumps([asdict(part) for part in task]) for task in tasks]


def decode_task(task: str) -> list[InputPart]:
    """A task's parts."""
    return msgspec.convert(json.loads(task), list[InputPart])


def cut_files(
    files: Sequence[InputFile], *, task_bytes: int = TASK_BYTES
) -> Iterator[tuple[InputPart, float]]:
    """Yield parts, with approximate bytes of text."""
    for file in files:
        if file.row_group_bytes:
            yield from _cut_row_groups(file, task_bytes)
        elif file.format == DATASET:
            yield from _cut_documents(file, task_bytes)
        elif file.format == "jsonl" and file.compression == "none" and file.num_bytes > task_bytes:
            for start in range(0, file.num_bytes, task_bytes):
                end = min(start + task_bytes, file.num_bytes)
                part = InputPart(file, start, None if end == file.num_bytes else end)
                yield part, end - start
        else:
            yield InputPart(file), file.estimated_text_bytes


def _cut_row_groups(file: InputFile, task_bytes: int) -> Iterator[tuple[InputPart, float]]:
    sizes, file = file.row_group_bytes, replace(file, row_group_bytes=())  # a part needs none
    start, size = 0, 0
    for index, num_bytes in enumerate(sizes):
        if size and size + num_bytes > task_bytes:
            yield InputPart(file, start, index), size
            start, size = index, 0
        size += num_bytes
    yield InputPart(file, start), size


def _cut_documents(file: InputFile, task_bytes: int) -> Iterator[tuple[InputPart, float]]:
    total = max(1, math.ceil(file.num_bytes / task_bytes))
    for number in range(total):
        start, end = (file.num_documents * n // total for n in (number, number + 1))
        yield InputPart(file, start, end), file.num_bytes / total
