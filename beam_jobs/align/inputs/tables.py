"""Rows of parquet, Arrow and CSV files: the columns that are asked for, as dictionaries."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs import storage
from beam_jobs.align.inputs.decompression import DAMAGE, CutStreamError, decompress
from beam_jobs.align.inputs.documents import Reason, UnusableError, unreadable
from beam_jobs.align.inputs.parts import InputFile, InputPart

TABLES = frozenset({"parquet", "arrow", "csv", "tsv"})
"""The formats that are read here."""

type Row = dict[str, Any] | UnusableError
"""A row, or why it can't be used."""

_ROWS_PER_BATCH = 256
_COUNTED_BYTES = 16 << 20
"""Rows of a longer file that doesn't say how many it has are counted in its start."""

_HEADER_BYTES = 1 << 30
_ARROW_FILE = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class _DamageError(Exception):
    """A table can't be read on; its cause says why."""


def read_shape(opened: BinaryIO, file: InputFile) -> tuple[list[str], tuple[int, ...]] | None:
    """Return a table's columns, and the uncompressed bytes of a parquet file's row groups.

    None if it is damaged, which reading it will report.
    """
    try:
        with _as_damage():
            if file.format == "parquet":
                metadata = pq.ParquetFile(opened).metadata
                groups = map(metadata.row_group, range(metadata.num_row_groups))
                names = metadata.schema.to_arrow_schema().names
                return names, tuple(group.total_byte_size for group in groups)
            if file.format == "arrow":
                return _open_arrow(opened).schema.names, ()
            data = decompress(opened, file.compression)
            return next(_csv_reader(data, file, _HEADER_BYTES), []), ()
    except _DamageError:
        return None


def read_rows(
    part: InputPart, fields: Sequence[str], *, max_cell_bytes: int
) -> Iterator[tuple[int, Row]]:
    """Yield (row number, row) for the rows of a part; of damage, where it is and what.

    Args:
        part: of a table.
        fields: what is needed; columns that are not there are left out, and of a nested field its
            whole column is read.
        max_cell_bytes: longest cell of a CSV file.
    """
    position = 0
    try:
        with storage.open_to_read(part.file.path) as opened, _as_damage():
            if part.file.format == "parquet":
                table, groups, position = _open_row_groups(opened, part)
                rows = _parquet_rows(table, groups, fields)
            elif part.file.format == "arrow":
                rows = _arrow_rows(opened, fields)
            else:
                rows = _csv_rows(opened, part.file, fields, max_cell_bytes)
            for row in rows:
                yield position, row
                position += 1
    except _DamageError as error:
        yield position, unreadable(error.__cause__ or error)


def count_rows(part: InputPart) -> tuple[int, int | None]:
    """Count a part's rows, or those at the start of a file that doesn't say how many it has.

    Returns:
        The number of rows, and how many uncompressed bytes they take; None: they are all. A file
        that can't be read has none.
    """
    try:
        with storage.open_to_read(part.file.path) as opened, _as_damage():
            if part.file.format == "parquet":
                table, groups, _ = _open_row_groups(opened, part)
                return sum(table.metadata.row_group(group).num_rows for group in groups), None
            if part.file.format == "arrow":
                batches = _arrow_batches(_open_arrow(opened))
                return _count_until(opened, (batch.num_rows for batch in batches))
            data = decompress(opened, part.file.compression)
            rows = _csv_reader(data, part.file, _HEADER_BYTES)
            next(rows, [])
            return _count_until(data, (bool(cells) for cells in rows))
    except _DamageError:
        return 0, None


@contextmanager
def _as_damage() -> Iterator[None]:
    """Raise what says that a table is damaged as one error; failures of the storage stay."""
    try:
        yield
    except (*DAMAGE, pa.ArrowException, csv.Error) as error:
        raise _DamageError from error
    except OSError as error:
        if error.errno is not None:  # Arrow's own, which are about damage, have none
            raise
        raise _DamageError from error


def _count_until(file: BinaryIO, counts: Iterable[int]) -> tuple[int, int | None]:
    total = 0
    for count in counts:
        total += count
        if file.tell() >= _COUNTED_BYTES:
            return total, file.tell()
    return total, None


def _open_row_groups(opened: BinaryIO, part: InputPart) -> tuple[pq.ParquetFile, range, int]:
    """Return the file, a part's row groups, and the number of the first row in them."""
    table = pq.ParquetFile(opened, page_checksum_verification=True)
    end = table.num_row_groups if part.end is None else part.end
    first = sum(table.metadata.row_group(i).num_rows for i in range(part.start))
    return table, range(part.start, end), first


def _parquet_rows(table: pq.ParquetFile, groups: range, fields: Sequence[str]) -> Iterator[Row]:
    present = set(table.schema_arrow.names)
    columns = [name for name in fields if name in present or name.split(".")[0] in present]
    for group in groups:  # one by one: damage to one spares those before it
        for batch in table.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=columns):
            yield from _rows_of(batch)


def _arrow_rows(opened: BinaryIO, fields: Sequence[str]) -> Iterator[Row]:
    is_stream, is_ended = _arrow_kind(opened)
    table = _open_arrow(opened)
    roots = {field.split(".")[0] for field in fields} | set(fields)
    columns = [name for name in table.schema.names if name in roots]
    for batch in _arrow_batches(table):
        chosen = batch.select(columns)
        _require_sound(chosen)
        for start in range(0, len(chosen), _ROWS_PER_BATCH):
            yield from _rows_of(chosen.slice(start, _ROWS_PER_BATCH))
    if is_stream and not is_ended:  # Arrow takes the end of the file for the end of the stream
        raise CutStreamError("the stream has no end mark: the file is cut")


def _arrow_batches(table: Any) -> Iterable[pa.RecordBatch]:
    if isinstance(table, pa.ipc.RecordBatchFileReader):
        return map(table.get_batch, range(table.num_record_batches))
    return cast(Iterable[pa.RecordBatch], table)


def _csv_rows(
    opened: BinaryIO, file: InputFile, fields: Sequence[str], max_cell_bytes: int
) -> Iterator[Row]:
    reader = _csv_reader(decompress(opened, file.compression), file, max_cell_bytes)
    header = next(reader, [])
    wanted = [(name, header.index(name)) for name in fields if name in header]
    for cells in filter(None, reader):  # blank lines aren't rows
        if len(cells) != len(header):
            detail = f"the row has {len(cells)} columns, the header {len(header)}"
            yield UnusableError(Reason.BAD_ROW, detail)
            continue
        row = {name: cells[column] for name, column in wanted}
        try:
            "".join(row.values()).encode()
        except UnicodeEncodeError as error:  # `surrogateescape` let the bytes through
            byte = ord(error.object[error.start]) & 0xFF
            detail = f"the row holds byte {byte:#x}, which is not UTF-8"
            yield UnusableError(Reason.INVALID_UNICODE, detail)
            continue
        yield row


def _csv_reader(data: BinaryIO, file: InputFile, max_cell_bytes: int) -> Iterator[list[str]]:
    csv.field_size_limit(max_cell_bytes)
    text = io.TextIOWrapper(data, "utf-8-sig", errors="surrogateescape", newline="")
    return csv.reader(text, delimiter="\t" if file.format == "tsv" else ",", strict=True)


def _arrow_kind(opened: BinaryIO) -> tuple[bool, bool]:
    """Return whether a file is a stream, and whether it ends with the mark of one."""
    is_stream = opened.read(len(_ARROW_FILE)) != _ARROW_FILE
    size = opened.seek(0, io.SEEK_END)
    opened.seek(max(0, size - len(_END_OF_STREAM)))
    is_ended = opened.read() == _END_OF_STREAM
    opened.seek(0)
    return is_stream, is_ended


def _open_arrow(opened: BinaryIO) -> Any:
    is_stream, _ = _arrow_kind(opened)
    return pa.ipc.open_stream(opened) if is_stream else pa.ipc.open_file(opened)


def _require_sound(batch: pa.RecordBatch) -> None:
    """Check that offsets stay within their buffers, for nothing else does; bad UTF-8 is not damage.

    Raises:
        ArrowInvalid: they don't.
    """
    for column in batch.columns:
        if pa.types.is_string(column.type):
            column = column.cast(pa.binary())
        elif pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())
        column.validate(full=True)


def _rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first row is yielded
        for index in range(len(batch)):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                detail = f"{error.reason} at byte {error.start}"
                yield UnusableError(Reason.INVALID_UNICODE, detail)
