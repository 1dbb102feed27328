"""Where each sample lies in its shard, and how long each document is: `*.index.parquet`.

The index alone is enough to plan rows of any length: it holds the token counts of both sides and
every *cut point*, a place where student and teacher tokens share a byte boundary, so that an
overlong document can be split without reading it.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.document import SCHEMA_VERSION
from schemas.errors import DamagedShardError, SchemaVersionError

CUT_STRIDE = 16
"""Student tokens per cut point: the last shared boundary of every 16 tokens is kept."""

_VERSION_KEY = b"vocag.schema_version"
_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("document_id", pa.string()),
        ("payload_offset", pa.uint64()),
        ("payload_bytes", pa.uint32()),
        ("crc32", pa.uint32()),
        ("num_text_bytes", pa.uint32()),
        ("num_student_tokens", pa.uint32()),
        ("num_teacher_tokens", pa.uint32()),
        ("cut_student", pa.list_(pa.field("element", pa.uint32(), nullable=False))),
        ("cut_teacher", pa.list_(pa.field("element", pa.uint32(), nullable=False))),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
_DELTA_COLUMNS = ("payload_offset", "cut_student.list.element", "cut_teacher.list.element")


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """One row per sample, in the order of the tar.

    Attributes:
        key: N strings of 32 hex digits.
        document_id: N strings.
        payload_offset: int64 [N], byte position of the sample's payload in the tar.
        payload_bytes: int64 [N], size of the payload.
        crc32: int64 [N], CRC-32 of the payload.
        num_text_bytes: int64 [N], UTF-8 bytes of the text.
        num_student_tokens: int64 [N].
        num_teacher_tokens: int64 [N].
        cut_starts: int64 [N + 1]; document i owns cut points cut_starts[i]:cut_starts[i + 1].
        cut_student: int64 [C], a cut lies before this student token of its document.
        cut_teacher: int64 [C], and before this teacher token.
    """

    key: Sequence[str]
    document_id: Sequence[str]
    payload_offset: NDArray[np.int64]
    payload_bytes: NDArray[np.int64]
    crc32: NDArray[np.int64]
    num_text_bytes: NDArray[np.int64]
    num_student_tokens: NDArray[np.int64]
    num_teacher_tokens: NDArray[np.int64]
    cut_starts: NDArray[np.int64]
    cut_student: NDArray[np.int64]
    cut_teacher: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.payload_offset)


def encode_index(index: ShardIndex) -> bytes:
    """Return the index as a parquet file; equal indices give equal bytes.

    Example:
        >>> decode_index(encode_index(index)).key == index.key
        True
    """
    columns: list[pa.Array] = []
    for field in _SCHEMA:
        if field.name.startswith("cut_"):
            values = pa.array(getattr(index, field.name).astype(np.uint32))
            starts = pa.array(index.cut_starts.astype(np.int32))
            columns.append(pa.ListArray.from_arrays(starts, values, type=field.type))
        else:
            columns.append(pa.array(getattr(index, field.name), field.type))
    sink = io.BytesIO()
    pq.write_table(
        pa.Table.from_arrays(columns, schema=_SCHEMA),
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(_DELTA_COLUMNS, "DELTA_BINARY_PACKED"),
    )
    return sink.getvalue()


def decode_index(data: bytes | str, *, with_names: bool = True) -> ShardIndex:
    """Return the index held by a parquet file.

    Args:
        data: the file's bytes, or a local path (memory-mapped).
        with_names: False leaves `key` and `document_id` empty, which is faster.

    Raises:
        DamagedShardError: no parquet file, or columns or values are missing.
        SchemaVersionError: another version of the format.
    """
    names = [n for n in _SCHEMA.names if with_names or n not in ("key", "document_id")]
    try:
        source = data if isinstance(data, str) else pa.BufferReader(data)
        file = pq.ParquetFile(source, memory_map=isinstance(data, str))
        version = (file.metadata.metadata or {}).get(_VERSION_KEY)
        if version != str(SCHEMA_VERSION).encode():
            found = version.decode(errors="replace") if version else None
            raise SchemaVersionError("shard index", found, SCHEMA_VERSION)
        columns_found, expected = (
            {f"{field.name}: {field.type}" for field in schema}
            for schema in (file.schema_arrow, _SCHEMA)
        )
        if columns_found != expected:
            raise pa.ArrowInvalid(f"its columns differ in {sorted(columns_found ^ expected)}")
        table = file.read(columns=names).combine_chunks()
        columns: dict[str, Any] = {"key": (), "document_id": ()}
        for name in names:
            columns |= _decode_column(name, table.column(name))
    except (pa.ArrowException, KeyError, OSError) as error:
        raise DamagedShardError(
            f"shard index is unreadable ({error}): restore it or run beam_jobs.align again"
        ) from error
    return ShardIndex(**columns)


def concatenate_indices(indices: Sequence[ShardIndex]) -> ShardIndex:
    """Return one index over the rows of several, in order."""
    arrays: dict[str, Any] = {}
    for field in fields(ShardIndex):
        parts = [getattr(index, field.name) for index in indices]
        if field.name in ("key", "document_id"):
            arrays[field.name] = [name for part in parts for name in part]
        elif field.name == "cut_starts":
            counts = [np.diff(part) for part in parts]
            arrays[field.name] = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)
        else:
            arrays[field.name] = np.concatenate([np.empty(0, np.int64), *parts])
    return ShardIndex(**arrays)


def _decode_column(name: str, column: pa.ChunkedArray) -> dict[str, Any]:
    if column.null_count:
        raise pa.ArrowInvalid(f"{name} has missing values")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    if name.startswith("cut_"):
        starts = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        values = array.values.to_numpy(zero_copy_only=False).astype(np.int64)
        return {name: values[starts[0] : starts[-1]], "cut_starts": starts - starts[0]}
    if name in ("key", "document_id"):
        return {name: array.to_pylist()}
    return {name: array.to_numpy(zero_copy_only=False).astype(np.int64)}
