"""Find the input files and their formats."""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from shlex import quote
from typing import BinaryIO
from unicodedata import category

from beam_jobs import storage
from beam_jobs.align.inputs import json_values
from beam_jobs.align.inputs.csv_rows import OTHER_SEPARATORS
from beam_jobs.align.inputs.decompression import DamageError, decompress
from beam_jobs.align.inputs.fields import longest_string, name_fields
from beam_jobs.align.inputs.formats import (
    FORMATS,
    Format,
    format_of_bytes,
    format_of_suffix,
    name_suffixes,
)
from beam_jobs.align.inputs.input_identity import content_of
from beam_jobs.align.inputs.json_values import holds_values
from beam_jobs.align.inputs.listing import FoundFile, fixed_folder, list_files, split_name
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.align.inputs.tables import read_rows, read_shape
from beam_jobs.first_bytes import (
    HEAD_BYTES,
    compression_of,
    is_plain_text,
    unreadable_kind_of,
)
from beam_jobs.job_errors import InputError
from pipeline.command_line.failures import hinted
from pipeline.command_line.git_lfs import POINTER_BYTES, refuse_pointer
from pipeline.command_line.pasted import pasted
from pipeline.drawing.formatting import format_plural

_OPEN_THREADS = 16
_FIRST_ROW_BYTES = 1 << 24
_IN_NO_NAME = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode's categories of controls, half surrogate pairs and breaks of lines or paragraphs: a name
becomes an id, which is a line of a table."""

logger = logging.getLogger(__name__)


def find_inputs(
    patterns: Sequence[str],
    *,
    fields: Sequence[str] = ("text",),
    others: Sequence[str] = (),
    format: Format | None = None,
    of_chats: bool = False,
) -> list[InputFile]:
    """Return the files that patterns name, in the order of their sources.

    Patterns are paths, globs (`*`, `**`, `?`, `[...]`), local or of any Beam file system, or
    folders of Hugging Face `datasets`. Tables must have `fields` as columns, and these and `others`
    only once. `format` None goes by names. InputError if a pattern matches nothing, a file can't be
    used, or two share a source; PointerError for a Git LFS pointer.
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
        inspect = partial(
            _inspect, fields=fields, others=others, is_named=format is None, of_chats=of_chats
        )
        inspected = list(pool.map(inspect, ordered))
    _say_misnamed(ordered, inspected)
    return inspected


def describe_inputs(files: Sequence[InputFile]) -> dict[str, int | str]:
    """The input's identity, from names and sizes."""
    listing = json.dumps([[file.source, file.num_bytes] for file in files])
    return {
        "input_files": len(files),
        "input_bytes": sum(file.num_bytes for file in files),
        "input_sha256": sha256(listing.encode()).hexdigest(),
    }


def _describe(found: FoundFile, folder: str, format: Format | None) -> InputFile:
    path, num_bytes, modified = found
    source = path.removeprefix(folder)
    if any(category(character) in _IN_NO_NAME for character in source):
        raise InputError(f"{path!r} has a name with control or undecodable characters; rename it")
    stem, compression = split_name(path)
    kind = format or format_of_suffix(os.path.splitext(stem)[1])
    if kind is None:
        raise InputError(
            f"{path} is of no known kind: {name_suffixes()} can be read; narrow the glob, or say "
            "what the files are, such as --format text"
        )
    return InputFile(path, source, num_bytes, kind, compression, modified)


def _inspect(
    file: InputFile,
    fields: Sequence[str],
    others: Sequence[str],
    *,
    is_named: bool,
    of_chats: bool,
) -> InputFile:
    try:
        file = replace(file, content=content_of(file.path, file.num_bytes))
        with storage.open_to_read(file.path) as opened:
            if file.num_bytes < POINTER_BYTES:
                refuse_pointer(file.path, opened.read(POINTER_BYTES))
                opened.seek(0)
            file = _by_first_bytes(opened, file, is_named=is_named)
            if file.format == "jsonl" and is_named:
                return replace(file, format=_lines_or_values(opened, file))
            if not FORMATS[file.format].table:
                return file
            shape = read_shape(opened, file)
    except OSError as error:
        raise InputError(f"{file.path} can't be opened: {error}; remove it or fix it") from error
    if shape is None:
        return file  # damaged: reading the file will make it a dead letter
    columns, row_group_bytes = shape
    _require_columns(file, columns, fields, of_chats)
    for field in (*fields, *others):
        if list(columns).count(field) > 1:
            raise InputError(f'{file.path} has several columns "{field}"; rename all but one')
    return replace(file, row_group_bytes=row_group_bytes)


def _by_first_bytes(opened: BinaryIO, file: InputFile, *, is_named: bool) -> InputFile:
    """Correct a file's kind by its first bytes; InputError if unsupported."""
    head = opened.read(HEAD_BYTES)
    opened.seek(0)
    compression = compression_of(head)
    if compression is None and file.compression != "none" and is_plain_text(head):
        compression = "none"
    file = replace(file, compression=compression or file.compression)
    if file.compression != "none":
        head = _read_head(opened, file, HEAD_BYTES)
        if twice := compression_of(head):
            raise InputError(
                f"{file.path} is {twice} within {file.compression}: decompress it once, and name "
                "what is in it"
            )
    if is_named:
        file = replace(file, format=format_of_bytes(head) or file.format)
    if kind := unreadable_kind_of(head):
        raise InputError(
            f"{file.path} is {kind}, by its first bytes, which isn't read here: unpack it, and "
            "name the files that were in it"
        )
    if FORMATS[file.format].is_packed and file.compression != "none":
        raise InputError(
            f"{file.path} is {file.format} and compressed as a whole ({file.compression}): such a "
            "file can't be read from its middle; decompress it (its columns are compressed already)"
        )
    return file


def _say_misnamed(named: Sequence[InputFile], found: Sequence[InputFile]) -> None:
    what = [
        file.format if FORMATS[file.format].is_packed else file.compression.replace("none", "plain")
        for file in found
    ]
    misnamed = [
        f"{file.path} is {kind}"
        for by_name, file, kind in zip(named, found, what, strict=True)
        if by_name.compression != file.compression
        or (FORMATS[file.format].is_packed and by_name.format != file.format)
    ]
    if misnamed:
        logger.warning(
            "names that contradict the first bytes: %s, read by the bytes: %s%s",
            format_plural(len(misnamed), "input file"),
            misnamed[0],
            ", …" if misnamed[1:] else "",
        )


def _lines_or_values(opened: BinaryIO, file: InputFile) -> str:
    head = _read_head(opened, file, json_values.HEAD_BYTES)
    may_be_pretty = split_name(file.path)[0].lower().endswith(".json")
    return "json" if holds_values(head, may_be_pretty=may_be_pretty) else "jsonl"


def _read_head(opened: BinaryIO, file: InputFile, num_bytes: int) -> bytes:
    """First bytes, decompressed; b"" if damaged, which reading reports later."""
    try:
        return decompress(opened, file.compression).read(num_bytes)
    except DamageError:
        return b""
    finally:
        opened.seek(0)


def _require_columns(
    file: InputFile, columns: Sequence[str], fields: Iterable[str], of_chats: bool
) -> None:
    for field in fields:
        root = field if FORMATS[file.format].is_untyped else field.split(".")[0]
        if field not in columns and root not in columns:
            raise _lacks_column(file, columns, field, of_chats)


def _lacks_column(
    file: InputFile, columns: Sequence[str], field: str, of_chats: bool
) -> InputError:
    separator = next((each for each in OTHER_SEPARATORS if each in "".join(columns[:1])), None)
    if file.format == "csv" and len(columns) == 1 and separator:
        error = InputError(
            f'{file.path} has no column "{field}", it has {name_fields(columns)}: its separator is '
            f'"{separator}", where .csv has ","; convert it'
        )
        if separator == "\t":
            return hinted(error, "--format tsv")
        convert = (
            'import csv, sys; sys.stdin.reconfigure(encoding="utf-8-sig", newline=""); '
            f'csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter="{separator}"))'
        )
        path = pasted(file.path)
        return hinted(error, f"python -c {quote(convert)} < {path} > {pasted(file.path + '.csv')}")
    options = "--messages" if of_chats else "--text-field or --text-template"
    error = InputError(
        f'{file.path} has no column "{field}", it has {name_fields(columns)}; choose with {options}'
    )
    if of_chats:
        return error
    rows = (row for _, row in read_rows(InputPart(file), columns, max_cell_bytes=_FIRST_ROW_BYTES))
    first = next(rows, {})
    longest = longest_string(first) if isinstance(first, dict) else None
    if longest is None:
        return error
    return hinted(
        error, f"--text-field {quote(longest)}  # has the longest string of the first row"
    )
