"""Read documents from files, or dead letters."""

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import BinaryIO

from beam_jobs import storage
from beam_jobs.align.inputs.datasets import read_texts
from beam_jobs.align.inputs.decompression import DamageError, decompress, require_utf8
from beam_jobs.align.inputs.documents import (
    LINE_BYTES_PER_TEXT_BYTE,
    DeadLetter,
    Outcome,
    PlacedDocument,
    ReadingRules,
    Reason,
    UnusableError,
    unreadable,
)
from beam_jobs.align.inputs.formats import FORMATS
from beam_jobs.align.inputs.input_identity import require_unchanged
from beam_jobs.align.inputs.json_parsing import parse_json
from beam_jobs.align.inputs.json_values import (
    BYTE_ORDER_MARK,
    JsonValue,
    split_line,
    split_values,
)
from beam_jobs.align.inputs.parts import DATASET, InputFile, InputPart
from beam_jobs.align.inputs.placing import place_record, place_text
from beam_jobs.align.inputs.tables import read_rows
from beam_jobs.running.job_progress import worker_progress

CountLines = Callable[[int], object]

_BEFORE_LINE = re.compile(rb"\A(?:\0|\xef\xbb\xbf)+")
"""Bytes before a line in files that were concatenated, or grew in a crash."""

_PROGRESS_DOCUMENTS = 1000
_SKIP_BYTES = 1 << 20


def read_part(
    part: InputPart, rules: ReadingRules, *, count_lines: CountLines = int
) -> Iterator[Outcome]:
    """Yield the documents of a part in order.

    Damage becomes a dead letter with the bytes lost; earlier documents and a table's later row
    groups are kept. The storage's failures are raised, for a retry. InputChangedError, also at the
    end, voids the part. `count_lines` gets the number of lines that begin in a part of JSON lines.
    """
    file = part.file
    if file.format == DATASET:
        yield from read_texts(part, rules)
        return
    if storage.is_local(file.path):  # a store is asked once
        require_unchanged(file)
    if FORMATS[file.format].table:
        yield from _read_table(part, rules)
    else:
        with storage.open_to_read(file.path) as stored:
            data = decompress(stored, file.compression)
            if file.format == "text":
                yield _read_text(data, file, rules)
            elif file.format == "json":
                yield from _read_json_values(data, file, rules)
            else:
                count_lines((yield from _read_json_lines(data, part, rules)))
    require_unchanged(file)


def show_progress[Each](records: Iterable[Each], run_folder: str) -> Iterator[Each]:
    """Pass records on; report documents and bytes of text now and then."""
    progress = worker_progress(run_folder)
    num_documents = num_bytes = 0
    for record in records:
        num_documents += isinstance(record, Outcome)
        num_bytes += len(record.text) if isinstance(record, PlacedDocument) else 0
        if num_documents == _PROGRESS_DOCUMENTS:
            progress.add(read_documents=num_documents, read_bytes=num_bytes)
            num_documents = num_bytes = 0
        yield record
    progress.add(read_documents=num_documents, read_bytes=num_bytes)


def _read_text(data: BinaryIO, file: InputFile, rules: ReadingRules) -> Outcome:
    source = file.source
    try:
        text = data.read(rules.max_document_bytes + 1 + len(BYTE_ORDER_MARK))
    except DamageError as error:
        return _damaged(file, 0, error)
    text = text.removeprefix(BYTE_ORDER_MARK)
    name = f"{source}#0"
    if len(text) > rules.max_document_bytes:
        detail = f"the file holds more than --max-document-bytes {rules.max_document_bytes}"
        return DeadLetter(source, 0, name, Reason.TOO_LARGE, detail)
    return place_text(text, {}, rules, source=source, position=0, document_id=name)


def _read_json_lines(
    data: BinaryIO, part: InputPart, rules: ReadingRules
) -> Generator[Outcome, None, int]:
    """Yield outcomes; return how many lines begin in the part."""
    source, position, number = part.file.source, part.start, 0
    try:
        if not position:
            require_utf8(data)
        else:  # the line that holds byte start - 1 belongs to the part before
            data.seek(position - 1)
            position += _skip_line(data) - 1
        while part.end is None or position < part.end:
            line = data.readline(rules.max_line_bytes + 1)
            if not line:
                break
            number += 1
            start, position = position, position + len(line)
            if len(line) > rules.max_line_bytes and not line.endswith(b"\n"):
                position += _skip_line(data)
                yield _too_long(source, start, position - start, rules, number)
            elif not line.isspace():
                yield from _parse_line(source, start, line, rules, number)
    except DamageError as error:
        yield _damaged(part.file, position, error, number + 1)
    return number


def _read_json_values(data: BinaryIO, file: InputFile, rules: ReadingRules) -> Iterator[Outcome]:
    end = 0
    try:
        require_utf8(data)
        for value in split_values(data, rules.max_line_bytes):
            end = value.position + value.num_bytes
            yield _place_value(value, rules, source=file.source)
    except DamageError as error:
        yield _damaged(file, end, error)


def _read_table(part: InputPart, rules: ReadingRules) -> Iterator[Outcome]:
    source, names = part.file.source, [field.name for field in rules.metadata]
    needed = [*rules.text_fields, *filter(None, [rules.id_field])]
    fields = list(dict.fromkeys([*needed, *names]))
    is_text = FORMATS[part.file.format].is_untyped
    most = rules.max_line_bytes
    for position, row in read_rows(part, fields, needed=needed, max_cell_bytes=most):
        if isinstance(row, UnusableError):
            yield DeadLetter(source, position, None, row.reason, row.detail)
        else:
            yield place_record(row, rules, source=source, position=position, is_text=is_text)


def _skip_line(data: BinaryIO) -> int:
    num_bytes = 0
    while part := data.readline(_SKIP_BYTES):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
    return num_bytes


def _parse_line(
    source: str, position: int, line: bytes, rules: ReadingRules, number: int
) -> Iterator[Outcome]:
    data = _BEFORE_LINE.sub(b"", line)
    if not data or data.isspace():
        return
    try:
        values = [JsonValue(0, len(line), parse_json(data))]
    except UnusableError as error:
        values = split_line(data, error)
    for value in values:
        value = value._replace(position=position + value.position)
        yield _place_value(value, rules, source=source, line=number)


def _place_value(
    value: JsonValue, rules: ReadingRules, *, source: str, line: int | None = None
) -> Outcome:
    if value.error is not None:
        why = value.error.reason, value.error.detail
        return DeadLetter(source, value.position, None, *why, line)
    return place_record(value.record, rules, source=source, position=value.position, line=line)


def _too_long(
    source: str, position: int, num_bytes: int, rules: ReadingRules, line: int
) -> DeadLetter:
    detail = (
        f"line of {num_bytes} bytes exceeds {LINE_BYTES_PER_TEXT_BYTE} times --max-document-bytes "
        f"{rules.max_document_bytes}"
    )
    return DeadLetter(source, position, None, Reason.TOO_LARGE, detail, line)


def _damaged(
    file: InputFile, position: int, error: DamageError, line: int | None = None
) -> DeadLetter:
    num_read = position if file.compression == "none" else error.num_read
    why = unreadable(error, file.num_bytes, num_read)
    return DeadLetter(file.source, position, None, why.reason, why.detail, line)
