"""Which files are read, under which names, and of which kind each is."""

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from typing import BinaryIO

import pyarrow as pa

from beam_jobs import storage
from beam_jobs.align.inputs.decompression import DamageError, decompress
from beam_jobs.align.inputs.input_identity import content_of
from beam_jobs.align.inputs.json_values import HEAD_BYTES, holds_values
from beam_jobs.align.inputs.listing import FORMATS, FoundFile, fixed_folder, list_files, split_name
from beam_jobs.align.inputs.parts import Format, InputFile
from beam_jobs.align.inputs.tables import TABLES, read_shape
from beam_jobs.errors import InputError
from pipeline.command_line.git_lfs import POINTER_BYTES, refuse_pointer

_RANDOM_ACCESS = ("parquet", "arrow")
_OPEN_THREADS = 16


def find_inputs(
    patterns: Sequence[str], *, fields: Sequence[str] = ("text",), format: Format | None = None
) -> list[InputFile]:
    """Return the files that the patterns name, in the order of their sources.

    Patterns are paths, globs (`*`, `**`, `?`, `[...]`), local or of any Beam file system, or
    folders of Hugging Face `datasets`. Tables must have `fields` as columns. The format is that of
    every file, whatever its name; None goes by names. InputError if a pattern matches nothing, a
    file can't be used, or two would have the same source; PointerError for a Git LFS pointer.
    """
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        pattern = storage.absolute(pattern)
        folder = fixed_folder(pattern)
        for found in list_files(pattern):
            files.setdefault(found.path, _describe(found, folder, format))
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
        return list(pool.map(lambda file: _inspect(file, fields, is_named=format is None), ordered))


def describe_inputs(files: Sequence[InputFile]) -> dict[str, int | str]:
    """Return count, bytes and a digest of names and sizes: what identifies the input."""
    listing = json.dumps([[file.source, file.num_bytes] for file in files])
    return {
        "input_files": len(files),
        "input_bytes": sum(file.num_bytes for file in files),
        "input_sha256": sha256(listing.encode()).hexdigest(),
    }


def _describe(found: FoundFile, folder: str, format: Format | None) -> InputFile:
    path, num_bytes, modified = found
    source = path.removeprefix(folder)
    if not source.isprintable():
        raise InputError(f"{path!r} has a name with control or undecodable characters; rename it")
    stem, compression = split_name(path)
    kind = format or FORMATS.get(os.path.splitext(stem)[1].lower())
    if kind in _RANDOM_ACCESS and compression != "none":
        raise InputError(
            f"{path} is {kind} and compressed as a whole: such a file can't be read from its "
            "middle; decompress it (its columns are compressed already)"
        )
    if kind is None:
        raise InputError(
            f"{path} is of no known kind: .jsonl, .ndjson, .json, .txt, .csv and .tsv (each also "
            ".gz, .zst, .bz2 or .xz), .parquet, .arrow and .feather can be read; narrow the glob, "
            "or say what the files are, such as --format text"
        )
    return InputFile(path, source, num_bytes, kind, compression, modified)


def _inspect(file: InputFile, fields: Sequence[str], *, is_named: bool) -> InputFile:
    try:
        file = replace(file, content=content_of(file.path, file.num_bytes))
        with storage.open_to_read(file.path) as opened:
            if file.num_bytes < POINTER_BYTES:
                refuse_pointer(file.path, opened.read(POINTER_BYTES))
                opened.seek(0)
            if file.format == "jsonl" and is_named:
                return replace(file, format=_lines_or_values(opened, file))
            if file.format not in TABLES:
                opened.read(1)
                return file
            shape = read_shape(opened, file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file.path} can't be opened: {error}; remove it or fix it") from error
    if shape is None:
        return file  # damaged: reading the file will make it a dead letter
    columns, row_group_bytes = shape
    _require_columns(file, columns, fields)
    return replace(file, row_group_bytes=row_group_bytes)


def _lines_or_values(opened: BinaryIO, file: InputFile) -> str:
    try:
        head = decompress(opened, file.compression).read(HEAD_BYTES)
    except DamageError:
        return "jsonl"  # reading it will say what is wrong
    may_be_pretty = split_name(file.path)[0].lower().endswith(".json")
    return "json" if holds_values(head, may_be_pretty=may_be_pretty) else "jsonl"


def _require_columns(file: InputFile, columns: Sequence[str], fields: Iterable[str]) -> None:
    for field in fields:
        root = field if file.format in ("csv", "tsv") else field.split(".")[0]
        if field not in columns and root not in columns:
            raise InputError(
                f'{file.path} has no column "{field}", it has {", ".join(columns)}; '
                "choose with --text-field or --text-template"
            )
        if list(columns).count(field) > 1:
            raise InputError(f'{file.path} has several columns "{field}"; rename all but one')
