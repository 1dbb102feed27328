"""Arrow files and streams, Feather 2 included."""

import io
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

import pyarrow as pa

from beam_jobs.align.inputs.arrow_rows import rows_of
from beam_jobs.align.inputs.decompression import DamageError
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.align.inputs.table_format import (
    ROWS_PER_BATCH,
    Row,
    Shape,
    TableFormat,
    Wanted,
    as_damage,
    count_until,
)

_ARROW_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_DAMAGE = (pa.ArrowException,)


def _arrow_rows(opened: BinaryIO, _: InputPart, wanted: Wanted) -> Iterator[Row]:
    with as_damage(_DAMAGE):
        table, is_whole = _open_arrow(opened)
        roots = {field.split(".")[0] for field in wanted.fields} | set(wanted.fields)
        columns = [name for name in table.schema.names if name in roots]
    with as_damage(_DAMAGE, opened.tell):
        for batch in _arrow_batches(table):
            chosen = batch.select(columns)
            _require_sound(chosen)
            for start in range(0, len(chosen), ROWS_PER_BATCH):
                yield from rows_of(chosen.slice(start, ROWS_PER_BATCH))
    if not is_whole:  # Arrow takes the end of the file for the end of the stream
        raise DamageError("the stream has no end mark: the file is cut", num_read=opened.tell())


def _arrow_shape(opened: BinaryIO, _: InputFile) -> Shape:
    return _open_arrow(opened)[0].schema.names, ()


def _arrow_count(opened: BinaryIO, _: InputPart) -> tuple[int, int | None]:
    batches = _arrow_batches(_open_arrow(opened)[0])
    return count_until(opened, (batch.num_rows for batch in batches))


def _arrow_batches(table: Any) -> Iterable[pa.RecordBatch]:
    if isinstance(table, pa.ipc.RecordBatchFileReader):
        return map(table.get_batch, range(table.num_record_batches))
    return cast(Iterable[pa.RecordBatch], table)


def _open_arrow(opened: BinaryIO) -> tuple[Any, bool]:
    """Return a file or stream, and whether it is whole."""
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
    """Check that offsets stay in their buffers, which pyarrow doesn't; bad UTF-8 passes."""
    for column in batch.columns:
        if pa.types.is_string(column.type):
            column = column.cast(pa.binary())
        elif pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())
        column.validate(full=True)


TABLE = TableFormat(_arrow_shape, _arrow_rows, _arrow_count, _DAMAGE)
