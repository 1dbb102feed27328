"""Arrow's batches as rows of JSON's values."""

from collections.abc import Iterator

import pyarrow as pa

from beam_jobs.align.inputs.documents import Reason, UnusableError
from beam_jobs.align.inputs.table_format import Row


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield rows; an error for text that isn't UTF-8."""
    batch = pa.RecordBatch.from_arrays(list(map(as_text, batch.columns)), batch.schema.names)
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first row is yielded
        for index in range(len(batch)):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                detail = f"{error.reason} at byte {error.start}"
                yield UnusableError(Reason.INVALID_UNICODE, detail)


def as_text(column: pa.Array) -> pa.Array:
    """Convert times, decimals and UUIDs to text as in JSON, fixed-length bytes to hexadecimal."""
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
