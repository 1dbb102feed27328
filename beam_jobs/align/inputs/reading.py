"""Documents out of files, and a dead letter for each one that can't be used.

Every document has a place: its source and a position there (byte offset of its line or value in the
uncompressed file, row number of a table, number in a dataset's shard, 0 of a text file). The place
is the same wherever the job runs and however files are cut into pieces, so documents without an id
are named by it.
"""

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

import orjson

from beam_jobs import storage
from beam_jobs.align.inputs.datasets import NoText, read_texts
from beam_jobs.align.inputs.decompression import DAMAGE, decompress
from beam_jobs.align.inputs.input_identity import require_unchanged
from beam_jobs.align.inputs.json_values import BYTE_ORDER_MARK, split_values
from beam_jobs.align.inputs.metadata import MetadataField, MisfitError, fit_value
from beam_jobs.align.inputs.pieces import DATASET, Piece
from beam_jobs.align.inputs.tables import TABLES, BadRow, DamagedTableError, read_rows
from beam_jobs.align.inputs.templates import parse_template

LINE_BYTES_PER_TEXT_BYTE = 4
"""JSON escapes make a text at most 3 times longer, control characters aside; the rest is slack for
other fields. A longer line is not parsed, so one huge line can't fill a worker's memory."""

CountLines = Callable[[int], object]

_SKIP_BYTES = 1 << 20
_MAX_EXACT_FLOAT = float(1 << 53)


class Reason(StrEnum):
    """Why a document is no sample: the codes in `dead_letters.jsonl`."""

    BAD_JSON = "bad_json"
    BAD_ROW = "bad_row"
    MISSING_TEXT = "missing_text"
    TEXT_NOT_A_STRING = "text_not_a_string"
    EMPTY_TEXT = "empty_text"
    INVALID_UNICODE = "invalid_unicode"
    BAD_ID = "bad_id"
    BAD_METADATA = "bad_metadata"
    TOO_LARGE = "too_large"
    UNREADABLE_INPUT = "unreadable_input"
    TEXT_LOST = "text_lost"
    DUPLICATE_ID = "duplicate_id"
    KNOWN_ID = "known_id"
    OVERLAP = "overlap"
    TOKENIZATION_FAILED = "tokenization_failed"


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A usable document and its place.

    Attributes:
        source: the input file.
        position: where in it.
        document_id: its id.
        text: its UTF-8 bytes.
        metadata: a value of each of `ReadingRules.metadata`.
        line: the line of JSON where it begins, counted from 1 at the start of its piece; None in
            files that don't consist of lines.
    """

    source: str
    position: int
    document_id: str
    text: bytes
    metadata: tuple[Any, ...] = ()
    line: int | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A document, or the rest of a damaged file, that can't be used. Never holds text.

    Attributes:
        source: the input file.
        position: where in it.
        document_id: its id, None where it is unknown.
        reason: a code.
        detail: for people.
        line: as a document's.
        first_line: the same of the document whose id this one repeats.
    """

    source: str
    position: int
    document_id: str | None
    reason: Reason
    detail: str
    line: int | None = None
    first_line: int | None = None


@dataclass(frozen=True)
class ReadingRules:
    """What counts as a document.

    Attributes:
        text_field: where the text is in a JSON object or a table's row; dots lead into nested ones.
        id_field: where its id is, "" to name every document by its place.
        max_document_bytes: longest text in UTF-8 bytes.
        text_template: how the text is joined from several fields, see
            `beam_jobs.align.inputs.templates`; "" to take `text_field` as it is.
        metadata: further fields that travel with the document.
    """

    text_field: str = "text"
    id_field: str = "id"
    max_document_bytes: int = 16 << 20
    text_template: str = ""
    metadata: tuple[MetadataField, ...] = ()

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields that a text is made of."""
        if not self.text_template:
            return (self.text_field,)
        return tuple(part.field for part in parse_template(self.text_template) if part.field)

    @property
    def max_line_bytes(self) -> int:
        """Longest line of JSON that is parsed."""
        return LINE_BYTES_PER_TEXT_BYTE * self.max_document_bytes


class _UnusableError(Exception):
    """Carries the reason for a dead letter out of the checks below."""

    def __init__(self, reason: Reason, detail: str, document_id: str | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.document_id = reason, detail, document_id


def read_piece(
    piece: Piece, rules: ReadingRules, *, count_lines: CountLines = int
) -> Iterator[PlacedDocument | DeadLetter]:
    """Yield the documents of a piece in order.

    Damage to the file becomes a dead letter at the place where reading stopped; what came before it
    is kept. Failures of the storage itself (a lost connection, a missing file) are raised, so that
    the runner tries again, and so is a file that was cut or written to since the job was planned.

    Args:
        piece: where they are.
        rules: what counts as one.
        count_lines: told in the end how many lines begin in a piece of JSON lines.

    Raises:
        InputChangedError: at the end, for what was read of a changing file is of no use.

    Example:
        >>> piece = Piece("/data/a.txt", "a.txt", "text", "none")
        >>> documents = list(read_piece(piece, ReadingRules()))  # doctest: +SKIP
    """
    yield from _read_documents(piece, rules, count_lines)
    require_unchanged(piece)


def _read_documents(
    piece: Piece, rules: ReadingRules, count_lines: CountLines
) -> Iterator[PlacedDocument | DeadLetter]:
    if piece.format in TABLES:
        yield from _read_table(piece, rules)
        return
    if piece.format == DATASET:
        yield from _read_shard(piece, rules)
        return
    with storage.open_to_read(piece.path) as stored:
        file = decompress(stored, piece.compression)
        if piece.format == "text":
            yield _read_text(file, piece, rules)
        elif piece.format == "json":
            yield from _read_json_values(file, piece, rules)
        else:
            count_lines((yield from _read_json_lines(file, piece, rules)))


def _read_text(file: BinaryIO, piece: Piece, rules: ReadingRules) -> PlacedDocument | DeadLetter:
    try:
        text = file.read(rules.max_document_bytes + 1 + len(BYTE_ORDER_MARK))
    except DAMAGE as error:
        return _damaged(piece.source, 0, error)
    text = text.removeprefix(BYTE_ORDER_MARK)
    document_id = f"{piece.source}#0"
    if len(text) > rules.max_document_bytes:
        detail = f"the file holds more than --max-document-bytes {rules.max_document_bytes}"
        return DeadLetter(piece.source, 0, document_id, Reason.TOO_LARGE, detail)
    try:
        nothing = (None,) * len(rules.metadata)
        return PlacedDocument(piece.source, 0, document_id, _check_text(text, "", rules), nothing)
    except _UnusableError as unusable:
        return DeadLetter(piece.source, 0, document_id, unusable.reason, unusable.detail)


def _read_json_lines(
    file: BinaryIO, piece: Piece, rules: ReadingRules
) -> Generator[PlacedDocument | DeadLetter, None, int]:
    """Yield what the lines hold; return how many begin in the piece."""
    position, number = piece.start, 0
    try:
        if position:  # the line that holds byte start - 1 belongs to the piece before
            file.seek(position - 1)
            position += _skip_line(file) - 1
        while piece.end is None or position < piece.end:
            line = file.readline(rules.max_line_bytes + 1)
            if not line:
                break
            number += 1
            start, position = position, position + len(line)
            if len(line) > rules.max_line_bytes and not line.endswith(b"\n"):
                position += _skip_line(file)
                yield _too_long(piece.source, start, position - start, rules, number)
            elif not line.isspace():
                yield _parse_line(piece.source, start, line, rules, number)
    except DAMAGE as error:
        yield _damaged(piece.source, position, error, number + 1)
    return number


def _read_json_values(
    file: BinaryIO, piece: Piece, rules: ReadingRules
) -> Iterator[PlacedDocument | DeadLetter]:
    end = 0
    try:
        for value in split_values(file, rules.max_line_bytes):
            end = value.position + value.num_bytes
            if value.data is None:
                yield _too_long(piece.source, value.position, value.num_bytes, rules, value.line)
            else:
                yield _parse_line(piece.source, value.position, value.data, rules, value.line)
    except DAMAGE as error:
        yield _damaged(piece.source, end, error)


def _skip_line(file: BinaryIO) -> int:
    num_bytes = 0
    while part := file.readline(_SKIP_BYTES):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
    return num_bytes


def _parse_line(
    source: str, position: int, line: bytes, rules: ReadingRules, number: int
) -> PlacedDocument | DeadLetter:
    if position == 0:
        line = line.removeprefix(BYTE_ORDER_MARK)
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        record = _parse_with_nan(line)
        if record is not None:
            return _place_document(source, position, record, rules, line=number)
        # Messages of orjson 3.13: "str is not valid UTF-8: surrogates not allowed", "no low
        # surrogate in string", "invalid high surrogate in string".
        reason = Reason.INVALID_UNICODE if "surrogate" in error.msg else Reason.BAD_JSON
        detail = f"{error.msg} at character {error.pos}"
        return DeadLetter(source, position, None, reason, detail, number)
    return _place_document(source, position, record, rules, line=number)


def _read_table(piece: Piece, rules: ReadingRules) -> Iterator[PlacedDocument | DeadLetter]:
    names = (*rules.text_fields, rules.id_field, *(field.name for field in rules.metadata))
    fields = list(dict.fromkeys(filter(None, names)))
    is_text = piece.format in ("csv", "tsv")
    try:
        for position, row in read_rows(piece, fields, max_cell_bytes=rules.max_line_bytes):
            if isinstance(row, BadRow):
                yield DeadLetter(piece.source, position, None, Reason(row.reason), row.detail)
            else:
                yield _place_document(piece.source, position, row, rules, is_text=is_text)
    except DamagedTableError as error:
        yield _damaged(piece.source, error.position, error.__cause__ or error)


def _read_shard(piece: Piece, rules: ReadingRules) -> Iterator[PlacedDocument | DeadLetter]:
    for found in read_texts(piece, [field.name for field in rules.metadata]):
        place = (piece.source, found.place, found.document_id)
        if isinstance(found, NoText):
            yield DeadLetter(*place, Reason(found.reason), found.detail)
            continue
        try:
            text = _check_text(found.text, "text", rules)
            yield PlacedDocument(*place, text, _metadata(found.metadata, rules, is_text=False))
        except _UnusableError as unusable:
            yield DeadLetter(*place, unusable.reason, unusable.detail)


def _place_document(
    source: str,
    position: int,
    record: Any,
    rules: ReadingRules,
    *,
    is_text: bool = False,
    line: int | None = None,
) -> PlacedDocument | DeadLetter:
    try:
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise _UnusableError(Reason.BAD_JSON, f"the line holds a JSON {kind}, not an object")
        document_id = _document_id(record, rules) or f"{source}#{position}"
        try:
            if rules.text_template:
                text = _join_fields(record, rules)
            else:
                text = _check_text(_look_up(record, rules.text_field), rules.text_field, rules)
            metadata = _metadata(record, rules, is_text) if rules.metadata else ()
        except _UnusableError as unusable:
            unusable.document_id = document_id
            raise
        return PlacedDocument(source, position, document_id, text, metadata, line)
    except _UnusableError as unusable:
        why = unusable.document_id, unusable.reason, unusable.detail
        return DeadLetter(source, position, *why, line)


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


def _look_up(record: Mapping[str, Any], field: str) -> Any:
    if field in record:
        return record[field]
    value: Any = record
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _document_id(record: Mapping[str, Any], rules: ReadingRules) -> str | None:
    value = _look_up(record, rules.id_field) if rules.id_field else None
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return None  # how pandas writes a missing number
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT:
        return str(int(value))  # a column of integers with one missing is one of floats in pandas
    kind = type(value).__name__
    raise _UnusableError(
        Reason.BAD_ID, f'"{rules.id_field}" is of type {kind}, not a string or an integer'
    )


def _metadata(record: Mapping[str, Any], rules: ReadingRules, is_text: bool) -> tuple[Any, ...]:
    try:
        return tuple(
            fit_value(field, _look_up(record, field.name), is_text=is_text)
            for field in rules.metadata
        )
    except MisfitError as error:
        raise _UnusableError(Reason.BAD_METADATA, str(error)) from None


def _join_fields(record: Mapping[str, Any], rules: ReadingRules) -> bytes:
    text = ""
    for literal, field in parse_template(rules.text_template):
        text += literal
        if field:
            value = _look_up(record, field)
            if not isinstance(value, str):
                _check_text(value, field, rules)  # says what is wrong with it
            text += value
    return _check_text(text, rules.text_template, rules)


def _check_text(text: Any, field: str, rules: ReadingRules) -> bytes:
    if text is None or (isinstance(text, float) and math.isnan(text)):
        raise _UnusableError(Reason.MISSING_TEXT, f'no "{field}" in the record')
    if isinstance(text, str):
        data = text.encode()
    elif isinstance(text, bytes):
        data = text
    else:
        kind = type(text).__name__
        raise _UnusableError(Reason.TEXT_NOT_A_STRING, f'"{field}" is of type {kind}')
    if not data:
        raise _UnusableError(Reason.EMPTY_TEXT, "the text has no characters")
    if len(data) > rules.max_document_bytes:
        raise _UnusableError(
            Reason.TOO_LARGE,
            f"text of {len(data)} bytes exceeds --max-document-bytes {rules.max_document_bytes}",
        )
    if isinstance(text, bytes):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            detail = f"{error.reason} at byte {error.start}"
            raise _UnusableError(Reason.INVALID_UNICODE, detail) from None
    return data


def _too_long(
    source: str, position: int, num_bytes: int, rules: ReadingRules, line: int
) -> DeadLetter:
    detail = (
        f"line of {num_bytes} bytes exceeds {LINE_BYTES_PER_TEXT_BYTE} times --max-document-bytes "
        f"{rules.max_document_bytes}"
    )
    return DeadLetter(source, position, None, Reason.TOO_LARGE, detail, line)


def _damaged(
    source: str, position: int, error: BaseException, line: int | None = None
) -> DeadLetter:
    detail = f"reading stopped here, the rest of the file is left out: {error}"
    return DeadLetter(source, position, None, Reason.UNREADABLE_INPUT, detail, line)
