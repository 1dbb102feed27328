"""Arrow's batches as rows of JSON's values."""

from collections.abc import Callable, Iterator
from contextlib import suppress

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
    with suppress(pa.ArrowNotImplementedError):  # other types of extensions stay as they are
        for leaf in (_in_utc, _of_text):
            wanted = _replace_leaves(kind, leaf)
            column = column if column.type == wanted else column.cast(wanted)
    return column


def _replace_leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Replace the types of a nested type's values; rows bring fields that nobody asked for."""

    def own(field: pa.Field) -> pa.Field:
        return field.with_type(_replace_leaves(field.type, leaf))

    types = pa.types
    if types.is_struct(kind):
        return pa.struct(list(map(own, kind)))
    if types.is_map(kind):
        return pa.map_(own(kind.key_field), own(kind.item_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(own(kind.value_field), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return (pa.list_ if types.is_list(kind) else pa.large_list)(own(kind.value_field))
    return leaf(kind)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else kind


def _of_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_temporal(kind) or pa.types.is_decimal(kind) else kind
