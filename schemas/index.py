"""A shard's index, `*.index.parquet`: samples' places, lengths, quality and metadata.

Plans need nothing else. A document can be split at *cut points*, byte boundaries that student and
teacher tokens share.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.document import SCHEMA_VERSION
from schemas.errors import RESTORE, DamagedShardError, SchemaVersionError

CUT_STRIDE = 16
"""Student tokens per cut point: every 16 have at most one, near their end."""

METADATA_PREFIX = "metadata."
"""Prefix of metadata columns."""

METADATA_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.dictionary(pa.int32(), pa.string()),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
"""The Arrow type of each `MetadataType`."""

CUTS = pa.list_(pa.field("element", pa.uint32(), nullable=False))
"""The Arrow type of cut points."""

CUT_COLUMNS = ("cut_student", "cut_teacher", "cut_at_turn")
_VERSION_KEY = b"vocag.schema_version"
_COLUMNS = pa.schema(
    [
        ("key", pa.string()),
        ("document_id", pa.string()),
        ("payload_offset", pa.uint64()),
        ("payload_bytes", pa.uint32()),
        ("crc32", pa.uint32()),
        ("num_text_bytes", pa.uint32()),
        ("num_student_tokens", pa.uint32()),
        ("num_teacher_tokens", pa.uint32()),
        ("cut_student", CUTS),
        ("cut_teacher", CUTS),
        ("num_mapped", pa.uint32()),
        ("byte_iou_sum", pa.float32()),
    ]
)
_CHAT_COLUMNS = pa.schema(
    [
        ("cut_at_turn", CUTS),
        ("num_learned_bytes", pa.uint32()),
        ("num_learned_student_tokens", pa.uint32()),
        ("num_learned_teacher_tokens", pa.uint32()),
        ("num_control_strings", pa.uint32()),
        ("num_seams", pa.uint32()),
        ("num_lone_seams", pa.uint32()),
    ]
)
_QUALITY = ("num_mapped", "byte_iou_sum")
_NAMES = ("key", "document_id")
# Cut points stay as they are stored: there are many, and planning reads few of them.
_AS_STORED = {"byte_iou_sum": np.float32, **dict.fromkeys(CUT_COLUMNS, np.uint32)}
_DTYPES: Mapping[str, Any] = {
    name: _AS_STORED.get(name, np.int64)
    for name in (*_COLUMNS.names, *_CHAT_COLUMNS.names)
    if name not in _NAMES
}
_DELTA_COLUMNS = ("payload_offset", "cut_student.list.element", "cut_teacher.list.element")


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """One row per sample, in the tar's order; arrays are int64 [N] unless noted.

    Attributes:
        key: N strings of 32 hex digits.
        document_id: N strings.
        payload_offset: the sample's first byte in the tar.
        payload_bytes: its size.
        crc32: its CRC-32.
        num_text_bytes: in UTF-8.
        num_student_tokens: in the sample.
        num_teacher_tokens: in the sample.
        cut_starts: [N + 1]; document i owns cut points cut_starts[i]:cut_starts[i + 1].
        cut_student: uint32 [C], the document's student token after the cut; int64 before storing.
        cut_teacher: as cut_student, for the teacher.
        num_mapped: student tokens with a teacher token.
        byte_iou_sum: float32 [N], sum over these of intersection over union, in bytes.
        metadata: by field, N values of one of `METADATA_TYPES`, or missing.
        chats: columns of chats by name, see `schemas/README.md`: `cut_at_turn`, uint32 [C], 1 if a
            cut is between two turns, and counts per document; empty for texts.
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
    cut_student: NDArray[np.uint32] | NDArray[np.int64]
    cut_teacher: NDArray[np.uint32] | NDArray[np.int64]
    num_mapped: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    byte_iou_sum: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    metadata: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)
    chats: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.payload_offset)


def encode_index(index: ShardIndex) -> bytes:
    """Encode an index as parquet; equal indices give equal bytes.

    ValueError unless each column has one value per document.
    """
    columns: list[pa.Array] = []
    own = [*_COLUMNS, *(_CHAT_COLUMNS if index.chats else ())]
    for entry in own:
        values = (
            index.chats[entry.name] if entry.name in index.chats else getattr(index, entry.name)
        )
        if entry.name.startswith("cut_"):
            columns.append(encode_cuts(index.cut_starts, values))
        else:
            _require_length(entry.name, values, index)
            columns.append(pa.array(values, entry.type))
    metadata = []
    for name, values in index.metadata.items():
        _require_length(name, values, index)
        metadata.append((METADATA_PREFIX + name, values.type))
        columns.append(_canonical(values))
    schema = pa.schema(
        [*own, *(pa.field(*column) for column in metadata)],
        metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
    )
    sink = io.BytesIO()
    pq.write_table(
        pa.Table.from_arrays(columns, schema=schema),
        sink,
        compression="zstd",
        use_dictionary=[name for name, kind in metadata if pa.types.is_dictionary(kind)],
        column_encoding=dict.fromkeys(_DELTA_COLUMNS, "DELTA_BINARY_PACKED"),
    )
    return sink.getvalue()


def decode_index(
    data: bytes, *, with_names: bool = True, metadata: Sequence[str] | None = None
) -> ShardIndex:
    """Decode an index.

    Without names, which is faster and enough for plans, names and quality are left out. `metadata`
    None reads every field if names are read, else none.

    Raises:
        DamagedShardError: not a parquet file, or columns or values are missing.
        SchemaVersionError: another version of the format.
    """
    with _damage_told():
        file = pq.ParquetFile(pa.BufferReader(data))
        columns, fields_found = _require_columns(file)
        if metadata is None:
            metadata = fields_found if with_names else ()
        names = [name for name in columns if with_names or name not in (*_NAMES, *_QUALITY)]
        wanted = [METADATA_PREFIX + name for name in metadata]
        # Plans read many indices at once, a thread each; threads per column would cost more.
        table = file.read(columns=[*names, *wanted], use_threads=with_names)
        values: dict[str, Any] = {"key": (), "document_id": ()}
        for name in names:
            values |= decode_column(name, table.column(name))
        starts = decode_column("cut_student", table.column("cut_student"))["cut_starts"]
        if not np.array_equal(starts, values["cut_starts"]):
            raise pa.ArrowInvalid("cut_student and cut_teacher differ in length")
        chats = {name: values.pop(name) for name in _CHAT_COLUMNS.names if name in values}
        if chats and len(chats["cut_at_turn"]) != len(values["cut_student"]):
            raise pa.ArrowInvalid("cut_student and cut_at_turn differ in length")
        values["chats"] = chats
        values["metadata"] = {
            name: table.column(column) for name, column in zip(metadata, wanted, strict=True)
        }
    return ShardIndex(**values)


def decode_ids(data: bytes) -> pa.ChunkedArray:
    """Return an index's ids alone, N strings, at much lower cost.

    DamagedShardError without any.
    """
    with _damage_told():
        table = pq.read_table(pa.BufferReader(data), columns=["document_id"])
    return table.column(0)


def concatenate_indices(indices: Sequence[ShardIndex]) -> ShardIndex:
    """Join indices' rows, in order."""
    arrays: dict[str, Any] = {}
    for entry in fields(ShardIndex):
        parts = [getattr(index, entry.name) for index in indices]
        if entry.name in _NAMES:
            arrays[entry.name] = [name for part in parts for name in part]
        elif entry.name == "metadata":
            arrays[entry.name] = {name: _join(parts, name) for name in (parts or [{}])[0]}
        elif entry.name == "chats":
            arrays[entry.name] = {
                name: np.concatenate([part[name] for part in parts if part])
                for name in (parts[-1] if parts else {})
            }
        elif entry.name == "cut_starts":
            counts = [np.diff(part) for part in parts]
            arrays[entry.name] = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)
        else:
            dtype = _DTYPES[entry.name]
            columns = [np.asarray(part, dtype) for part in parts]
            arrays[entry.name] = np.concatenate([np.empty(0, dtype), *columns])
    return ShardIndex(**arrays)


def encode_cuts(starts: NDArray[np.int64], cuts: NDArray[np.int64]) -> pa.ListArray:
    """Return a column of N lists, cuts[starts[i]:starts[i + 1]]."""
    values = pa.array(cuts.astype(np.uint32))
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), values, type=CUTS)


def decode_column(name: str, column: pa.ChunkedArray) -> dict[str, Any]:
    """Return a column's values, and a list's starts, by attribute of an index.

    pa.ArrowInvalid if any is missing.
    """
    if column.null_count:
        raise pa.ArrowInvalid(f"{name} has missing values")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    if name.startswith("cut_"):
        starts = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        values = array.values.to_numpy(zero_copy_only=False)
        return {name: values[starts[0] : starts[-1]], "cut_starts": starts - starts[0]}
    if name in _NAMES:
        return {name: array.to_pylist()}
    dtype = _DTYPES[name]
    return {name: array.to_numpy(zero_copy_only=False).astype(dtype)}


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, KeyError, OSError) as error:
        raise DamagedShardError(f"shard index is unreadable ({error}): {RESTORE}") from error


def _require_length(name: str, values: Any, index: ShardIndex) -> None:
    if len(values) != len(index):
        raise ValueError(
            f"{name} has {len(values)} values for {len(index)} documents: an index has one for each"
        )


def _join(parts: Sequence[Mapping[str, pa.ChunkedArray]], name: str) -> pa.ChunkedArray:
    chunks = [chunk for part in parts for chunk in part[name].chunks]
    return pa.chunked_array(chunks, parts[0][name].type)


def _canonical(values: pa.ChunkedArray) -> pa.Array:
    """Number strings by first occurrence, for any chunks."""
    if not pa.types.is_dictionary(values.type):
        return values.combine_chunks()
    return values.cast(pa.string()).combine_chunks().dictionary_encode()


def _require_columns(file: pq.ParquetFile) -> tuple[list[str], list[str]]:
    version = (file.metadata.metadata or {}).get(_VERSION_KEY)
    if version != str(SCHEMA_VERSION).encode():
        found = version.decode(errors="replace") if version else None
        raise SchemaVersionError("shard index", found, SCHEMA_VERSION)
    own, metadata = list[str](), list[str]()
    columns = [*_COLUMNS]
    if "cut_at_turn" in file.schema_arrow.names:
        columns += [*_CHAT_COLUMNS]
    for entry in file.schema_arrow:
        if entry.name.startswith(METADATA_PREFIX) and entry.type in METADATA_TYPES.values():
            metadata.append(entry.name.removeprefix(METADATA_PREFIX))
        else:
            own.append(f"{entry.name}: {entry.type}")
    differences = set(own) ^ {f"{entry.name}: {entry.type}" for entry in columns}
    if differences:
        raise pa.ArrowInvalid(f"its columns differ in {sorted(differences)}")
    return [entry.name for entry in columns], metadata
