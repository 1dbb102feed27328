"""Documents out of files, and a dead letter for each one that can't be used."""

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, BinaryIO

import orjson

from beam_jobs import storage
from beam_jobs.align.inputs.datasets import read_texts
from beam_jobs.align.inputs.decompression import DAMAGE, decompress
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
from beam_jobs.align.inputs.input_identity import require_unchanged
from beam_jobs.align.inputs.json_values import BYTE_ORDER_MARK, split_values
from beam_jobs.align.inputs.parts import DATASET, InputPart
from beam_jobs.align.inputs.records import place_record, place_text
from beam_jobs.align.inputs.tables import TABLES, read_rows
from beam_jobs.running.progress import worker_progress

CountLines = Callable[[int], object]

_PROGRESS_DOCUMENTS = 1000
_SKIP_BYTES = 1 << 20


def read_part(
    part: InputPart, rules: ReadingRules, *, count_lines: CountLines = int
) -> Iterator[Outcome]:
    """Yield the documents of a part in order.

    Damage to the file becomes a dead letter at the place where reading stopped; what came before it
    is kept. Failures of the storage itself (a lost connection, a missing file) are raised, so that
    the runner tries again, and so is a file that was cut or written to since the job was planned.

    Args:
        part: where they are.
        rules: what counts as one.
        count_lines: told in the end how many lines begin in a part of JSON lines.

    Raises:
        InputChangedError: at the end, for what was read of a changing file is of no use.
    """
    file = part.file
    if file.format == DATASET:
        yield from read_texts(part, rules)
        return
    if file.format in TABLES:
        yield from _read_table(part, rules)
    else:
        with storage.open_to_read(file.path) as stored:
            data = decompress(stored, file.compression)
            if file.format == "text":
                yield _read_text(data, file.source, rules)
            elif file.format == "json":
                yield from _read_json_values(data, file.source, rules)
            else:
                count_lines((yield from _read_json_lines(data, part, rules)))
    require_unchanged(file)


def show_progress[Each](records: Iterable[Each], run_folder: str) -> Iterator[Each]:
    """Hand records on, and show now and then how many documents and how much text they were.

    Args:
        records: documents and dead letters; whatever else is among them is not counted.
        run_folder: the run's, where progress is kept.
    """
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


def _read_text(data: BinaryIO, source: str, rules: ReadingRules) -> Outcome:
    try:
        text = data.read(rules.max_document_bytes + 1 + len(BYTE_ORDER_MARK))
    except DAMAGE as error:
        return _damaged(source, 0, error)
    text = text.removeprefix(BYTE_ORDER_MARK)
    name = f"{source}#0"
    if len(text) > rules.max_document_bytes:
        detail = f"the file holds more than --max-document-bytes {rules.max_document_bytes}"
        return DeadLetter(source, 0, name, Reason.TOO_LARGE, detail)
    return place_text(text, {}, rules, source=source, position=0, document_id=name)


def _read_json_lines(
    data: BinaryIO, part: InputPart, rules: ReadingRules
) -> Generator[Outcome, None, int]:
    """Yield what the lines hold; return how many begin in the part."""
    source, position, number = part.file.source, part.start, 0
    try:
        if position:  # the line that holds byte start - 1 belongs to the part before
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
                yield _parse_line(source, start, line, rules, number)
    except DAMAGE as error:
        yield _damaged(source, position, error, number + 1)
    return number


def _read_json_values(data: BinaryIO, source: str, rules: ReadingRules) -> Iterator[Outcome]:
    end = 0
    try:
        for value in split_values(data, rules.max_line_bytes):
            end = value.position + value.num_bytes
            if value.data is None:
                yield _too_long(source, value.position, value.num_bytes, rules)
            else:
                yield _parse_line(source, value.position, value.data, rules)
    except DAMAGE as error:
        yield _damaged(source, end, error)


def _read_table(part: InputPart, rules: ReadingRules) -> Iterator[Outcome]:
    source, names = part.file.source, [field.name for field in rules.metadata]
    fields = list(dict.fromkeys(filter(None, (*rules.text_fields, rules.id_field, *names))))
    is_text = part.file.format in ("csv", "tsv")
    for position, row in read_rows(part, fields, max_cell_bytes=rules.max_line_bytes):
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
    source: str, position: int, line: bytes, rules: ReadingRules, number: int | None = None
) -> Outcome:
    if position == 0:
        line = line.removeprefix(BYTE_ORDER_MARK)
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        record = _parse_with_nan(line)
        if record is None:
            # Messages of orjson 3.13: "str is not valid UTF-8: surrogates not allowed", "no low
            # surrogate in string", "invalid high surrogate in string".
            reason = Reason.INVALID_UNICODE if "surrogate" in error.msg else Reason.BAD_JSON
            detail = f"{error.msg} at character {error.pos}"
            return DeadLetter(source, position, None, reason, detail, number)
    return place_record(record, rules, source=source, position=position, line=number)


def _parse_with_nan(line: bytes) -> Any:
    """Return what a line holds that only NaN or Infinity keep from being JSON, None for others."""
    if b"NaN" not in line and b"Infinity" not in line:
        return None
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # no lone surrogate anywhere
    except (ValueError, RecursionError):
        return None
    return record


def _too_long(
    source: str, position: int, num_bytes: int, rules: ReadingRules, line: int | None = None
) -> DeadLetter:
    detail = (
        f"line of {num_bytes} bytes exceeds {LINE_BYTES_PER_TEXT_BYTE} times --max-document-bytes "
        f"{rules.max_document_bytes}"
    )
    return DeadLetter(source, position, None, Reason.TOO_LARGE, detail, line)


def _damaged(
    source: str, position: int, error: BaseException, line: int | None = None
) -> DeadLetter:
    why = unreadable(error)
    return DeadLetter(source, position, None, why.reason, why.detail, line)
