"""Rows of parquet, Arrow and CSV files: the columns that are asked for, as dictionaries."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs import storage
from beam_jobs.align.inputs.decompression import DAMAGE, CutStreamError, decompress
from beam_jobs.align.inputs.pieces import Piece

TABLES = frozenset({"parquet", "arrow", "csv", "tsv"})
"""The formats that are read here."""

_ROWS_PER_BATCH = 256
_COUNTED_BYTES = 16 << 20
"""Rows of a longer file that doesn't say how many it has are counted in its start."""

_ARROW_FILE = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be used, and why."""

    reason: Literal["bad_row", "invalid_unicode"]
    detail: str


class DamagedTableError(Exception):
    """A table can't be read on; its cause says why.

    Attributes:
        position: the first row that is lost.
    """

    def __init__(self, position: int) -> None:
        """Say which row is the first that is lost."""
        super().__init__(position)
        self.position = position


@dataclass(frozen=True)
class TableShape:
    """What a table's header or footer says.

    Attributes:
        columns: their names.
        row_group_bytes: uncompressed bytes of each row group of a parquet file.
    """

    columns: tuple[str, ...]
    row_group_bytes: tuple[int, ...] = ()


def read_shape(file: BinaryIO, piece: Piece) -> TableShape | None:
    """Return a table's columns; None where it is damaged, which reading it will report."""
    try:
        if piece.format == "parquet":
            metadata = pq.ParquetFile(file).metadata
            groups = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
            return TableShape(tuple(metadata.schema.to_arrow_schema().names), tuple(groups))
        if piece.format == "arrow":
            return TableShape(tuple(_open_arrow(file).schema.names))
        header = next(_csv_reader(decompress(file, piece.compression), piece, 1 << 30), [])
        return TableShape(tuple(header))
    except (*DAMAGE, pa.ArrowException, csv.Error):
        return None
    except OSError as error:
        if error.errno is not None:
            raise  # the storage failed; Arrow's own OSErrors, about damage, have no errno
        return None


def read_rows(
    piece: Piece, fields: Sequence[str], *, max_cell_bytes: int
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield (row number, row) for the rows of a piece.

    Args:
        piece: of a table.
        fields: what is needed; columns that are not there are left out, and of a nested field its
            whole column is read.
        max_cell_bytes: longest cell of a CSV file.

    Raises:
        DamagedTableError: at the first row that can't be read.

    Example:
        >>> piece = Piece("/a.csv", "a.csv", "csv", "none")
        >>> next(read_rows(piece, ["text"], max_cell_bytes=99))  # doctest: +SKIP
        (0, {'text': 'the first row'})
    """
    position = 0
    try:
        with storage.open_to_read(piece.path) as file:
            if piece.format == "parquet":
                table, groups, position = _open_row_groups(file, piece)
                rows = _parquet_rows(table, groups, fields)
            elif piece.format == "arrow":
                rows = _arrow_rows(file, fields)
            else:
                rows = _csv_rows(file, piece, fields, max_cell_bytes)
            for row in rows:
                yield position, row
                position += 1
    except (*DAMAGE, pa.ArrowException, csv.Error) as error:
        raise DamagedTableError(position) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DamagedTableError(position) from error


def count_rows(piece: Piece) -> tuple[int, int | None]:
    """Count a piece's rows, or those at the start of a file that doesn't say how many it has.

    Returns:
        The number of rows, and how many uncompressed bytes they take; None: they are all.

    Raises:
        DamagedTableError: the file can't be read.
    """
    try:
        with storage.open_to_read(piece.path) as file:
            if piece.format == "parquet":
                table, groups, _ = _open_row_groups(file, piece)
                return sum(table.metadata.row_group(group).num_rows for group in groups), None
            if piece.format == "arrow":
                batches = _arrow_batches(_open_arrow(file))
                return _count_until(file, (batch.num_rows for batch in batches))
            data = decompress(file, piece.compression)
            rows = _csv_reader(data, piece, 1 << 30)
            next(rows, [])
            return _count_until(data, (bool(cells) for cells in rows))
    except (*DAMAGE, pa.ArrowException, csv.Error) as error:
        raise DamagedTableError(0) from error


def _count_until(file: BinaryIO, counts: Iterable[int]) -> tuple[int, int | None]:
    total = 0
    for count in counts:
        total += count
        if file.tell() >= _COUNTED_BYTES:
            return total, file.tell()
    return total, None


type _Rows = Iterator[dict[str, Any] | BadRow]


def _open_row_groups(file: BinaryIO, piece: Piece) -> tuple[pq.ParquetFile, range, int]:
    """Return the file, a piece's row groups, and the number of the first row in them."""
    table = pq.ParquetFile(file, page_checksum_verification=True)
    end = table.num_row_groups if piece.end is None else piece.end
    first = sum(table.metadata.row_group(i).num_rows for i in range(piece.start))
    return table, range(piece.start, end), first


def _parquet_rows(table: pq.ParquetFile, groups: range, fields: Sequence[str]) -> _Rows:
    present = set(table.schema_arrow.names)
    columns = [name for name in fields if name in present or name.split(".")[0] in present]
    for group in groups:  # one by one: damage to one spares those before it
        for batch in table.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=columns):
            yield from _rows_of(batch)


def _arrow_rows(file: BinaryIO, fields: Sequence[str]) -> _Rows:
    is_stream, is_ended = _arrow_kind(file)
    table = _open_arrow(file)
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


def _csv_rows(file: BinaryIO, piece: Piece, fields: Sequence[str], max_cell_bytes: int) -> _Rows:
    reader = _csv_reader(decompress(file, piece.compression), piece, max_cell_bytes)
    header = next(reader, [])
    wanted = [(name, header.index(name)) for name in fields if name in header]
    for cells in filter(None, reader):  # blank lines are no rows
        if len(cells) != len(header):
            detail = f"the row has {len(cells)} columns, the header {len(header)}"
            yield BadRow("bad_row", detail)
            continue
        row = {name: cells[column] for name, column in wanted}
        try:
            "".join(row.values()).encode()
        except UnicodeEncodeError as error:  # `surrogateescape` let the bytes through
            byte = ord(error.object[error.start]) & 0xFF
            yield BadRow("invalid_unicode", f"the row holds byte {byte:#x}, which is not UTF-8")
            continue
        yield row


def _csv_reader(data: BinaryIO, piece: Piece, max_cell_bytes: int) -> Iterator[list[str]]:
    csv.field_size_limit(max_cell_bytes)
    text = io.TextIOWrapper(data, "utf-8-sig", errors="surrogateescape", newline="")
    return csv.reader(text, delimiter="\t" if piece.format == "tsv" else ",", strict=True)


def _arrow_kind(file: BinaryIO) -> tuple[bool, bool]:
    """Return whether a file is a stream, and whether it ends with the mark of one."""
    is_stream = file.read(len(_ARROW_FILE)) != _ARROW_FILE
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - len(_END_OF_STREAM)))
    is_ended = file.read() == _END_OF_STREAM
    file.seek(0)
    return is_stream, is_ended


def _open_arrow(file: BinaryIO) -> Any:
    is_stream, _ = _arrow_kind(file)
    return pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)


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


def _rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRow]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first row is yielded
        for index in range(len(batch)):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield BadRow("invalid_unicode", f"{error.reason} at byte {error.start}")
