"""Documents out of files, and a dead letter for each one that can't be used.

Every document has a place: its source and a position there (byte offset of its line in the
uncompressed file, row number of a parquet file, 0 of a text file). The place is the same wherever
the job runs and however files are cut into pieces, so documents without an id are named by it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs import storage
from beam_jobs.decompression import DAMAGE, decompress
from beam_jobs.inputs import Piece

LINE_BYTES_PER_TEXT_BYTE = 4
"""JSON escapes make a text at most 3 times longer, control characters aside; the rest is slack for
other fields. A longer line is not parsed, so one huge line can't fill a worker's memory."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20
_ROWS_PER_BATCH = 256


class Reason(StrEnum):
    """Why a document is no sample: the codes in `dead_letters.jsonl`."""

    BAD_JSON = "bad_json"
    MISSING_TEXT = "missing_text"
    TEXT_NOT_A_STRING = "text_not_a_string"
    EMPTY_TEXT = "empty_text"
    INVALID_UNICODE = "invalid_unicode"
    BAD_ID = "bad_id"
    TOO_LARGE = "too_large"
    UNREADABLE_INPUT = "unreadable_input"
    DUPLICATE_ID = "duplicate_id"
    TOKENIZATION_FAILED = "tokenization_failed"


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A usable document and its place; `text` is its UTF-8 bytes."""

    source: str
    position: int
    document_id: str
    text: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A document, or the rest of a damaged file, that can't be used. Never holds text."""

    source: str
    position: int
    document_id: str | None
    reason: Reason
    detail: str


@dataclass(frozen=True)
class ReadingRules:
    """What counts as a document.

    Attributes:
        text_field: where the text is in a JSON object or parquet row; dots lead into nested ones.
        id_field: where its id is, "" to name every document by its place.
        max_document_bytes: longest text in UTF-8 bytes.
    """

    text_field: str = "text"
    id_field: str = "id"
    max_document_bytes: int = 16 << 20

    @property
    def max_line_bytes(self) -> int:
        """Longest line of JSON that is parsed."""
        return LINE_BYTES_PER_TEXT_BYTE * self.max_document_bytes


class _UnusableError(Exception):
    """Carries the reason for a dead letter out of the checks below."""

    def __init__(self, reason: Reason, detail: str, document_id: str | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.document_id = reason, detail, document_id


def read_piece(piece: Piece, rules: ReadingRules) -> Iterator[PlacedDocument | DeadLetter]:
    """Yield the documents of a piece in order.

    Damage to the file becomes a dead letter at the place where reading stopped; what came before it
    is kept. Failures of the storage itself (a lost connection, a missing file) are raised, so that
    the runner tries again.

    Example:
        >>> list(read_piece(Piece("/data/a.txt", "a.txt", "text", "none"), ReadingRules()))
    """
    if piece.format == "parquet":
        yield from _read_parquet(piece, rules)
        return
    with storage.open_to_read(piece.path) as stored:
        file = decompress(stored, piece.compression)
        if piece.format == "text":
            yield _read_text(file, piece, rules)
        else:
            yield from _read_json_lines(file, piece, rules)


def _read_text(file: BinaryIO, piece: Piece, rules: ReadingRules) -> PlacedDocument | DeadLetter:
    try:
        text = file.read(rules.max_document_bytes + 1)
    except DAMAGE as error:
        return _damaged(piece.source, 0, error)
    document_id = f"{piece.source}#0"
    if len(text) > rules.max_document_bytes:
        detail = f"the file holds more than --max-document-bytes {rules.max_document_bytes}"
        return DeadLetter(piece.source, 0, document_id, Reason.TOO_LARGE, detail)
    try:
        return PlacedDocument(piece.source, 0, document_id, _check_text(text, rules))
    except _UnusableError as unusable:
        return DeadLetter(piece.source, 0, document_id, unusable.reason, unusable.detail)


def _read_json_lines(
    file: BinaryIO, piece: Piece, rules: ReadingRules
) -> Iterator[PlacedDocument | DeadLetter]:
    position = piece.start
    try:
        if position:  # the line that holds byte start - 1 belongs to the piece before
            file.seek(position - 1)
            position += _skip_line(file) - 1
        while piece.end is None or position < piece.end:
            line = file.readline(rules.max_line_bytes + 1)
            if not line:
                return
            start, position = position, position + len(line)
            if len(line) > rules.max_line_bytes and not line.endswith(b"\n"):
                position += _skip_line(file)
                yield _too_long(piece.source, start, position - start, rules)
            elif not line.isspace():
                yield _parse_line(piece.source, start, line, rules)
    except DAMAGE as error:
        yield _damaged(piece.source, position, error)


def _skip_line(file: BinaryIO) -> int:
    num_bytes = 0
    while part := file.readline(_SKIP_BYTES):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
    return num_bytes


def _parse_line(
    source: str, position: int, line: bytes, rules: ReadingRules
) -> PlacedDocument | DeadLetter:
    if position == 0:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        # Messages of orjson 3.13: "str is not valid UTF-8: surrogates not allowed", "no low
        # surrogate in string", "invalid high surrogate in string".
        reason = Reason.INVALID_UNICODE if "surrogate" in error.msg else Reason.BAD_JSON
        return DeadLetter(source, position, None, reason, f"{error.msg} at character {error.pos}")
    return _place_document(source, position, record, rules)


def _read_parquet(piece: Piece, rules: ReadingRules) -> Iterator[PlacedDocument | DeadLetter]:
    position = 0
    try:
        with storage.open_to_read(piece.path) as stored:
            file = pq.ParquetFile(stored, page_checksum_verification=True)
            end = file.num_row_groups if piece.end is None else piece.end
            counts = [file.metadata.row_group(i).num_rows for i in range(end)]
            position = sum(counts[: piece.start])
            present = {name.split(".")[0] for name in file.schema_arrow.names}
            columns = [n for n in (rules.text_field, rules.id_field) if n.split(".")[0] in present]
            for record in _records(file, range(piece.start, end), columns):
                yield _place_document(piece.source, position, record, rules)
                position += 1
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # the storage failed; Arrow's own OSErrors, about damage, have no errno
        yield _damaged(piece.source, position, error)


def _records(file: pq.ParquetFile, groups: Iterable[int], columns: list[str]) -> Iterator[Any]:
    for group in groups:  # one by one: damage to one spares those before it
        for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=columns):
            yield from _rows(batch)


def _rows(batch: pa.RecordBatch) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first row is yielded
        for index in range(len(batch)):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield _UnusableError(
                    Reason.INVALID_UNICODE, f"{error.reason} at byte {error.start}"
                )


def _place_document(
    source: str, position: int, record: Any, rules: ReadingRules
) -> PlacedDocument | DeadLetter:
    try:
        if isinstance(record, _UnusableError):
            raise record
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise _UnusableError(Reason.BAD_JSON, f"the line holds a JSON {kind}, not an object")
        document_id = _document_id(record, rules) or f"{source}#{position}"
        try:
            text = _check_text(_look_up(record, rules.text_field), rules)
        except _UnusableError as unusable:
            unusable.document_id = document_id
            raise
        return PlacedDocument(source, position, document_id, text)
    except _UnusableError as unusable:
        return DeadLetter(source, position, unusable.document_id, unusable.reason, unusable.detail)


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
    kind = type(value).__name__
    raise _UnusableError(
        Reason.BAD_ID, f'"{rules.id_field}" is of type {kind}, not a string or an integer'
    )


def _check_text(text: Any, rules: ReadingRules) -> bytes:
    if text is None:
        raise _UnusableError(Reason.MISSING_TEXT, f'no "{rules.text_field}" in the record')
    if isinstance(text, str):
        data = text.encode()
    elif isinstance(text, bytes):
        data = text
    else:
        kind = type(text).__name__
        raise _UnusableError(Reason.TEXT_NOT_A_STRING, f'"{rules.text_field}" is of type {kind}')
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


def _too_long(source: str, position: int, num_bytes: int, rules: ReadingRules) -> DeadLetter:
    detail = (
        f"line of {num_bytes} bytes exceeds {LINE_BYTES_PER_TEXT_BYTE} times --max-document-bytes "
        f"{rules.max_document_bytes}"
    )
    return DeadLetter(source, position, None, Reason.TOO_LARGE, detail)


def _damaged(source: str, position: int, error: BaseException) -> DeadLetter:
    detail = f"reading stopped here, the rest of the file is left out: {error}"
    return DeadLetter(source, position, None, Reason.UNREADABLE_INPUT, detail)
