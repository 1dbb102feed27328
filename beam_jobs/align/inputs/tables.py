"""Rows of parquet, Arrow and CSV files: the requested columns, as dictionaries."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs import storage
from beam_jobs.align.inputs.csv_rows import HEAD_BYTES, CsvRow, read_csv
from beam_jobs.align.inputs.decompression import DamageError, decompress
from beam_jobs.align.inputs.documents import Reason, UnusableError, unreadable
from beam_jobs.align.inputs.parts import InputFile, InputPart

type Row = dict[str, Any] | UnusableError
"""A row, or why it can't be used."""

type Shape = tuple[list[str], tuple[int, ...]]
"""Columns, and the uncompressed bytes of a parquet file's row groups."""

_ROWS_PER_BATCH = 256
_COUNTED_BYTES = 16 << 20
"""Rows of a longer file that doesn't say how many it has are counted in its start."""

_HEADER_BYTES = 1 << 30
_ARROW_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_shape(opened: BinaryIO, file: InputFile) -> Shape | None:
    """Return a table's `Shape`; None if it is damaged, which reading reports later."""
    try:
        with _as_damage():
            return TABLES[file.format].shape(opened, file)
    except DamageError:
        return None


@dataclass(frozen=True)
class Wanted:
    """The columns to read; a row of CSV may lack cells after the needed ones."""

    fields: Sequence[str]
    needed: Sequence[str]
    max_cell_bytes: int


def read_rows(
    part: InputPart, fields: Sequence[str], *, max_cell_bytes: int, needed: Sequence[str] = ()
) -> Iterator[tuple[int, Row]]:
    """Yield (row number, row) for a part's rows, (row number, error) for damage.

    Missing columns are left out; a nested field brings its whole column. With `needed` columns, a
    row of CSV may lack cells after them.
    """
    position, wanted = 0, Wanted(fields, needed, max_cell_bytes)
    try:
        with storage.open_to_read(part.file.path) as opened:
            for row in TABLES[part.file.format].rows(opened, part, wanted):
                if isinstance(row, int):
                    position = row
                    continue
                yield position, row
                position += 1
    except DamageError as error:
        yield position, unreadable(error, part.file.num_bytes, error.num_read)


def count_rows(part: InputPart) -> tuple[int, int | None]:
    """Count a part's rows, or those at the start of a file without a recorded count.

    Also return the uncompressed bytes they take; None if they are all rows, or unreadable.
    """
    try:
        with storage.open_to_read(part.file.path) as opened, _as_damage():
            return TABLES[part.file.format].num_rows(opened, part)
    except DamageError:
        return 0, None


@contextmanager
def _as_damage(tell: Callable[[], int] = int) -> Iterator[None]:
    """Turn every error of a damaged table into DamageError; failures of the storage pass."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:  # a column's name need not be UTF-8
        raise DamageError(str(error), num_read=tell()) from error
    except MemoryError as error:  # without words of its own: a damaged length asks for anything
        text = "it asks for more memory than there is: its lengths are damaged, or it is too large"
        raise DamageError(text, num_read=tell()) from error
    except OSError as error:
        if error.errno is not None:  # Arrow's own, which are about damage, have none
            raise
        raise DamageError(str(error), num_read=tell()) from error


def _count_until(file: BinaryIO, counts: Iterable[int]) -> tuple[int, int | None]:
    total = 0
    for count in counts:
        total += count
        if file.tell() >= _COUNTED_BYTES:
            return total, file.tell()
    return total, None


def _parquet_shape(opened: BinaryIO, _: InputFile) -> Shape:
    metadata = pq.ParquetFile(opened).metadata
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    names = metadata.schema.to_arrow_schema().names
    return names, tuple(group.total_byte_size for group in groups)


def _parquet_count(opened: BinaryIO, part: InputPart) -> tuple[int, None]:
    table, groups, _ = _open_row_groups(opened, part)
    return sum(table.metadata.row_group(group).num_rows for group in groups), None


def _open_row_groups(opened: BinaryIO, part: InputPart) -> tuple[pq.ParquetFile, range, int]:
    """Return the file, a part's row groups, and the number of their first row."""
    table = pq.ParquetFile(opened, page_checksum_verification=True)
    end = table.num_row_groups if part.end is None else part.end
    first = sum(table.metadata.row_group(i).num_rows for i in range(part.start))
    return table, range(part.start, end), first


def _parquet_rows(opened: BinaryIO, part: InputPart, wanted: Wanted) -> Iterator[Row | int]:
    """Yield rows, and a row number before each row group; damage costs the rest of its group."""
    with _as_damage():
        table, groups, end = _open_row_groups(opened, part)
    columns = _parquet_columns(table, wanted.fields)
    for group in groups:
        position, end, why = end, end + table.metadata.row_group(group).num_rows, "it is cut"
        yield position
        try:
            with _as_damage():
                for batch in table.iter_batches(
                    _ROWS_PER_BATCH, row_groups=[group], columns=columns
                ):
                    yield from _rows_of(batch)
                    position += len(batch)
        except DamageError as error:
            why = str(error)
        if position < end:
            lost = f"rows {position} to {end - 1}, {end - position} of row group {group},"
            yield UnusableError(Reason.UNREADABLE_INPUT, f"{lost} can't be read: {why}")


def _parquet_columns(table: pq.ParquetFile, fields: Sequence[str]) -> list[str]:
    """Return the columns of the fields; for a map, which has no columns by name, the whole map."""
    schema, present = table.schema, set(table.schema_arrow.names)
    paths = [f"{schema.column(place).path}." for place in range(len(schema))]
    own = [any(path.startswith(f"{name}.") for path in paths) for name in fields]
    names = [
        name if is_own else name.split(".")[0] for name, is_own in zip(fields, own, strict=True)
    ]
    return [name for name in names if name.split(".")[0] in present or name in present]


def _arrow_rows(opened: BinaryIO, _: InputPart, wanted: Wanted) -> Iterator[Row]:
    with _as_damage():
        table, is_whole = _open_arrow(opened)
        roots = {field.split(".")[0] for field in wanted.fields} | set(wanted.fields)
        columns = [name for name in table.schema.names if name in roots]
    with _as_damage(opened.tell):
        for batch in _arrow_batches(table):
            chosen = batch.select(columns)
            _require_sound(chosen)
            for start in range(0, len(chosen), _ROWS_PER_BATCH):
                yield from _rows_of(chosen.slice(start, _ROWS_PER_BATCH))
    if not is_whole:  # Arrow takes the end of the file for the end of the stream
        raise DamageError("the stream has no end mark: the file is cut", num_read=opened.tell())


def _arrow_shape(opened: BinaryIO, _: InputFile) -> Shape:
    return _open_arrow(opened)[0].schema.names, ()


def _arrow_count(opened: BinaryIO, _: InputPart) -> tuple[int, int | None]:
    batches = _arrow_batches(_open_arrow(opened)[0])
    return _count_until(opened, (batch.num_rows for batch in batches))


def _arrow_batches(table: Any) -> Iterable[pa.RecordBatch]:
    if isinstance(table, pa.ipc.RecordBatchFileReader):
        return map(table.get_batch, range(table.num_record_batches))
    return cast(Iterable[pa.RecordBatch], table)


def _csv_rows(opened: BinaryIO, part: InputPart, wanted: Wanted) -> Iterator[Row]:
    rows = _read_csv(opened, part.file, wanted.max_cell_bytes, needed=wanted.needed)
    header = next(rows, [])
    if isinstance(header, UnusableError):
        raise DamageError(f"the header can't be read: {header.detail}")
    places = [(name, header.index(name)) for name in wanted.fields if name in header]
    for cells in rows:
        if isinstance(cells, UnusableError):
            yield cells
            continue
        yield {name: cells[column] for name, column in places if column < len(cells)}


def _csv_shape(opened: BinaryIO, file: InputFile) -> Shape:
    header = next(_read_csv(opened, file, _HEADER_BYTES), [])
    return header if isinstance(header, list) else [], ()


def _csv_count(opened: BinaryIO, part: InputPart) -> tuple[int, int | None]:
    rows = _read_csv(opened, part.file, _HEADER_BYTES)
    return _count_until(opened, (1 for _ in islice(rows, 1, None)))


def _read_csv(
    opened: BinaryIO, file: InputFile, max_cell_bytes: int, *, needed: Sequence[str] = ()
) -> Iterator[CsvRow]:
    head = None if file.format == "csv" else b""
    if head is not None:
        with suppress(DamageError):
            head = decompress(opened, file.compression).read(HEAD_BYTES)
        opened.seek(0)
    data = decompress(opened, file.compression)
    return read_csv(data, max_cell=max_cell_bytes, head=head, needed=needed)


def _open_arrow(opened: BinaryIO) -> tuple[Any, bool]:
    """Return a file or stream, and whether a stream ends with its end mark."""
    start = opened.read(len(_ARROW_FILE))
    if start.startswith(_FEATHER_1):
        raise DamageError(
            "it is Feather 1: read it with pandas, write it as parquet or Feather 2", num_read=0
        )
    size = opened.seek(0, io.SEEK_END)
    opened.seek(max(0, size - len(_END_OF_STREAM)))
    is_ended = opened.read() == _END_OF_STREAM
    opened.seek(0)
    if start == _ARROW_FILE:
        return pa.ipc.open_file(opened), True
    return pa.ipc.open_stream(opened), is_ended


def _require_sound(batch: pa.RecordBatch) -> None:
    """Check that offsets stay within their buffers, which pyarrow doesn't; bad UTF-8 may pass."""
    for column in batch.columns:
        if pa.types.is_string(column.type):
            column = column.cast(pa.binary())
        elif pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())
        column.validate(full=True)


def _rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    batch = pa.RecordBatch.from_arrays(list(map(_as_text, batch.columns)), batch.schema.names)
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first row is yielded
        for index in range(len(batch)):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                detail = f"{error.reason} at byte {error.start}"
                yield UnusableError(Reason.INVALID_UNICODE, detail)


def _as_text(column: pa.Array) -> pa.Array:
    """Convert times, decimals and UUIDs, which serve only as ids, to text as in JSON.

    Bytes of a fixed length, such as a hash, become hexadecimal.
    """
    kind, types = column.type, pa.types
    if isinstance(kind, pa.UuidType):
        texts = [None if value is None else str(value) for value in column.to_pylist()]
        return pa.array(texts, pa.string())
    if types.is_fixed_size_binary(kind):
        hexadecimal = [None if value is None else value.hex() for value in column.to_pylist()]
        return pa.array(hexadecimal, pa.string())
    if types.is_timestamp(kind) and kind.tz:
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    if any(
        test(kind) for test in (types.is_timestamp, types.is_date, types.is_time, types.is_decimal)
    ):
        return column.cast(pa.string())
    return column


class TableFormat(NamedTuple):
    """How tables of a format are read; each function gets the open file first.

    `rows` yields a part's rows, and a number before a row that doesn't follow the last.
    """

    shape: Callable[[BinaryIO, InputFile], Shape]
    rows: Callable[[BinaryIO, InputPart, Wanted], Iterator[Row | int]]
    num_rows: Callable[[BinaryIO, InputPart], tuple[int, int | None]]


_CSV = TableFormat(_csv_shape, _csv_rows, _csv_count)
TABLES = {
    "parquet": TableFormat(_parquet_shape, _parquet_rows, _parquet_count),
    "arrow": TableFormat(_arrow_shape, _arrow_rows, _arrow_count),
    "csv": _CSV,
    "tsv": _CSV,
}
"""The formats that are read here."""
