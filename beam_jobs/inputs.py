"""Which files are read, under which names, in which pieces.

A *piece* is what one worker reads without help: a file, a range of bytes of a large JSON lines
file, or some row groups of a parquet file. Small pieces travel together in one *task*. Nothing
downstream depends on where pieces end: a document is named by its file and its place in it.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems

from beam_jobs import storage

TASK_BYTES = 64 << 20
"""Input bytes of one task, where files can be cut or put together to reach it."""

SAMPLE_BYTES_PER_TEXT_BYTE = 3
"""Tar bytes per byte of text: 9 to 10 bytes per student token of 3 to 4 bytes."""

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_EXPANSION = {"none": 1.0, "gzip": 4.0, "zstd": 4.0, "parquet": 3.0}
_WILDCARD = re.compile(r"[*?\[]")
_OPEN_THREADS = 16


class InputError(ValueError):
    """The input can't be read as asked for: a mistake to correct before the job starts."""


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus.

    Attributes:
        path: where it is on this machine or in the object store.
        source: its name in ids and dead letters, relative to the fixed part of its glob, and so
            the same on every machine.
        num_bytes: its size.
        format: "jsonl", "parquet" or "text".
        compression: "none", "gzip" or "zstd".
        row_group_bytes: uncompressed bytes of a parquet file's row groups; empty where the file
            is no parquet or its footer is unreadable.
    """

    path: str
    source: str
    num_bytes: int
    format: str
    compression: str
    row_group_bytes: tuple[int, ...] = ()

    @property
    def estimated_text_bytes(self) -> float:
        """Roughly how much text it holds; compressed files are taken to expand 3 or 4 times."""
        return self.num_bytes * _EXPANSION.get(self.format, _EXPANSION[self.compression])


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes [start, end) of JSON lines, row groups [start, end) of parquet.

    A piece of JSON lines owns the lines that begin in its range. `end` is None where the rest of
    the file belongs to it.
    """

    path: str
    source: str
    format: str
    compression: str
    start: int = 0
    end: int | None = None


def find_inputs(patterns: Sequence[str], *, text_field: str) -> list[InputFile]:
    """Return the files that the patterns name, in the order of their sources.

    Args:
        patterns: paths or globs (`*`, `**`, `?`, `[...]`), local or of any Beam file system.
        text_field: the column that parquet files must have.

    Raises:
        InputError: a pattern matches nothing, a file is of an unknown kind or can't be opened, two
            files would have the same source, or a parquet file lacks the column.

    Example:
        >>> find_inputs(["corpus/part-*.jsonl.zst"], text_field="text")
    """
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        pattern = storage.absolute(pattern)
        for path, num_bytes in _match(pattern):
            files.setdefault(path, _describe(path, num_bytes, _fixed_folder(pattern)))
    by_source: dict[str, InputFile] = {}
    for file in files.values():
        other = by_source.setdefault(file.source, file)
        if other is not file:
            raise InputError(
                f'two input files would be named "{file.source}": {other.path} and {file.path}; '
                "name them by one glob over their common folder"
            )
    ordered = [by_source[source] for source in sorted(by_source)]
    with ThreadPoolExecutor(_OPEN_THREADS) as pool:
        return list(pool.map(lambda file: _inspect(file, text_field), ordered))


def describe_inputs(files: Sequence[InputFile]) -> dict[str, int | str]:
    """Return count, bytes and a digest of names and sizes: what identifies the input."""
    listing = json.dumps([[file.source, file.num_bytes] for file in files])
    return {
        "input_files": len(files),
        "input_bytes": sum(file.num_bytes for file in files),
        "input_sha256": sha256(listing.encode()).hexdigest(),
    }


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
    for piece, num_bytes in _pieces(files, task_bytes):
        if not tasks or num_bytes > room:
            tasks.append([])
            room = task_bytes
        tasks[-1].append(piece)
        room -= num_bytes
    return [json.dumps([asdict(piece) for piece in task]) for task in tasks]


def decode_task(task: str) -> list[Piece]:
    """Return the pieces of a task."""
    return [Piece(**piece) for piece in json.loads(task)]


def _match(pattern: str) -> Iterator[tuple[str, int]]:
    if storage.is_local(pattern) and os.path.isfile(pattern):
        yield pattern, os.path.getsize(pattern)  # whatever wildcards its name may hold
        return
    if storage.is_local(pattern) and os.path.isdir(pattern):
        raise InputError(
            f"--input {pattern} is a folder: name its files, such as {pattern}/*.jsonl"
        )
    try:
        found = FileSystems.match([pattern])[0].metadata_list
    except (BeamIOError, ValueError) as error:
        raise InputError(f"--input {pattern} can't be listed: {error}") from error
    if not found:
        raise InputError(f"--input {pattern} matches no file; quote globs and check the folder")
    yield from ((entry.path, entry.size_in_bytes) for entry in found)


def _fixed_folder(pattern: str) -> str:
    is_plain = storage.is_local(pattern) and os.path.isfile(pattern)
    wildcard = None if is_plain else _WILDCARD.search(pattern)
    fixed = pattern[: wildcard.start()] if wildcard else pattern
    return fixed[: fixed.rfind("/") + 1]


def _describe(path: str, num_bytes: int, folder: str) -> InputFile:
    source = path.removeprefix(folder)
    if not source.isprintable():
        raise InputError(f"{path!r} has a name with control or undecodable characters; rename it")
    stem, compression = path, "none"
    for suffix, name in _COMPRESSIONS.items():
        if path.endswith(suffix):
            stem, compression = path.removesuffix(suffix), name
    suffix = os.path.splitext(stem)[1].lower()
    if suffix == ".parquet" and compression == "none":
        return InputFile(path, source, num_bytes, "parquet", compression)
    if suffix not in _FORMATS:
        raise InputError(
            f"{path} is of no known kind: .jsonl, .ndjson, .json and .txt (each also .gz or .zst) "
            "and .parquet can be read; narrow the glob or rename the file"
        )
    return InputFile(path, source, num_bytes, _FORMATS[suffix], compression)


def _inspect(file: InputFile, text_field: str) -> InputFile:
    try:
        with storage.open_to_read(file.path) as opened:
            if file.format != "parquet":
                opened.read(1)
                return file
            metadata = pq.ParquetFile(opened).metadata
    except (pa.ArrowException, OSError) as error:
        if file.format == "parquet" and getattr(error, "errno", None) is None:
            return file  # a damaged footer: reading the file will make it a dead letter
        raise InputError(f"{file.path} can't be opened: {error}; remove it or fix it") from error
    columns = metadata.schema.to_arrow_schema().names
    root = text_field.split(".")[0]
    if text_field not in columns and root not in columns:
        raise InputError(
            f'{file.path} has no column "{text_field}", it has {", ".join(columns)}; '
            "choose one with --text-field"
        )
    groups = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return InputFile(**{**asdict(file), "row_group_bytes": tuple(groups)})


def _pieces(files: Sequence[InputFile], task_bytes: int) -> Iterator[tuple[Piece, float]]:
    for file in files:
        kind = (file.path, file.source, file.format, file.compression)
        if file.format == "parquet" and file.row_group_bytes:
            yield from _row_group_pieces(file, task_bytes)
        elif file.format == "jsonl" and file.compression == "none" and file.num_bytes > task_bytes:
            for start in range(0, file.num_bytes, task_bytes):
                end = min(start + task_bytes, file.num_bytes)
                yield Piece(*kind, start, end), end - start
        else:
            yield Piece(*kind), file.estimated_text_bytes


def _row_group_pieces(file: InputFile, task_bytes: int) -> Iterator[tuple[Piece, float]]:
    kind = (file.path, file.source, file.format, file.compression)
    start, size = 0, 0
    for index, num_bytes in enumerate(file.row_group_bytes):
        if size and size + num_bytes > task_bytes:
            yield Piece(*kind, start, index), size
            start, size = index, 0
        size += num_bytes
    yield Piece(*kind, start, len(file.row_group_bytes)), size
