"""Parquet files, cut between row groups; a damaged group costs itself."""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs import storage
from beam_jobs.align.inputs.arrow_rows import rows_of
from beam_jobs.align.inputs.decompression import DamageError
from beam_jobs.align.inputs.documents import Reason, UnusableError
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.align.inputs.table_format import (
    ROWS_PER_BATCH,
    Row,
    Shape,
    TableFormat,
    Wanted,
    as_damage,
)

_BUFFER_BYTES = 1 << 20
_DAMAGE = (pa.ArrowException,)


def _parquet_shape(opened: BinaryIO, _: InputFile) -> Shape:
    metadata = pq.ParquetFile(opened).metadata
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    names = metadata.schema.to_arrow_schema().names
    return names, tuple(group.total_byte_size for group in groups)


def _parquet_count(opened: BinaryIO, part: InputPart) -> tuple[int, None]:
    table, groups, _ = _open_row_groups(opened, part)
    return sum(table.metadata.row_group(group).num_rows for group in groups), None


def _open_row_groups(opened: BinaryIO, part: InputPart) -> tuple[pq.ParquetFile, range, int]:
    """The file, a part's row groups, and their first row's number."""
    # Else all of a row group's bytes are in memory. In a store each column's buffer is a request.
    is_local = storage.is_local(part.file.path)
    buffered = {"buffer_size": _BUFFER_BYTES, "pre_buffer": False} if is_local else {}
    table = pq.ParquetFile(opened, page_checksum_verification=True, **buffered)
    end = table.num_row_groups if part.end is None else part.end
    first = sum(table.metadata.row_group(i).num_rows for i in range(part.start))
    return table, range(part.start, end), first


def _parquet_rows(opened: BinaryIO, part: InputPart, wanted: Wanted) -> Iterator[Row | int]:
    """Yield rows, and a row number before each group; damage costs the group's rest."""
    with as_damage(_DAMAGE):
        table, groups, end = _open_row_groups(opened, part)
    columns = _parquet_columns(table, wanted.fields)
    for group in groups:
        position, end, why = end, end + table.metadata.row_group(group).num_rows, "it is cut"
        yield position
        try:
            with as_damage(_DAMAGE):
                for batch in table.iter_batches(
                    ROWS_PER_BATCH, row_groups=[group], columns=columns
                ):
                    yield from rows_of(batch)
                    position += len(batch)
        except DamageError as error:
            why = str(error)
        if position < end:
            lost = f"rows {position} to {end - 1}, {end - position} of row group {group},"
            yield UnusableError(Reason.UNREADABLE_INPUT, f"{lost} can't be read: {why}")


def _parquet_columns(table: pq.ParquetFile, fields: Sequence[str]) -> list[str]:
    """Columns of the fields; for a map's key, the whole map."""
    schema, present = table.schema, set(table.schema_arrow.names)
    paths = [f"{schema.column(place).path}." for place in range(len(schema))]
    own = [any(path.startswith(f"{name}.") for path in paths) for name in fields]
    names = [
        name if is_own else name.split(".")[0] for name, is_own in zip(fields, own, strict=True)
    ]
    return [name for name in names if name.split(".")[0] in present or name in present]


TABLE = TableFormat(_parquet_shape, _parquet_rows, _parquet_count, _DAMAGE)
