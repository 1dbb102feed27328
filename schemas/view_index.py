"""Where each document of a shard lies in its view, and how long it is there: `*.view-NAME.parquet`.

What of a shard's index depends on both tokenizers stands here again, so that rows of any length
are planned from the two indices alone.
"""

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.errors import DamagedShardError, SchemaVersionError
from schemas.index import CUTS, ShardIndex, decode_column, encode_cuts
from schemas.view_file import VIEW_MAGIC, Side

VIEW_VERSION = VIEW_MAGIC[-1]
"""Of a view's two files; it has nothing to do with the dataset's."""

_VERSION_KEY = b"vocag.view_version"
_PLACES = pa.schema(
    [("payload_bytes", pa.uint32()), ("crc32", pa.uint32()), ("num_tokens", pa.uint32())]
)
_PAIR = pa.schema(
    [
        ("cut_student", CUTS),
        ("cut_teacher", CUTS),
        ("num_mapped", pa.uint32()),
        ("byte_iou_sum", pa.float32()),
    ]
)
_DELTA_COLUMNS = ("cut_student.list.element", "cut_teacher.list.element")


@dataclass(frozen=True, eq=False)
class ViewIndex:
    """One row per document, in the order of the shard's index.

    Attributes:
        payload_bytes: int64 [N], size of each payload; they lie end to end behind `VIEW_MAGIC`. 0:
            the view's tokenizer can't tokenize the document, which a reader leaves out.
        crc32: int64 [N], CRC-32 of the payload.
        num_tokens: int64 [N], of the view's own side.
        cut_starts: int64 [N + 1], as in `ShardIndex`.
        cut_student: uint32 [C]; int64 before it is stored.
        cut_teacher: uint32 [C], likewise.
        num_mapped: int64 [N].
        byte_iou_sum: float32 [N].
    """

    payload_bytes: NDArray[np.int64]
    crc32: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    cut_starts: NDArray[np.int64]
    cut_student: NDArray[np.uint32] | NDArray[np.int64]
    cut_teacher: NDArray[np.uint32] | NDArray[np.int64]
    num_mapped: NDArray[np.int64]
    byte_iou_sum: NDArray[np.float32]

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.payload_bytes)

    @property
    def starts(self) -> NDArray[np.int64]:
        """First byte of each payload in the view's file, and the file's size; int64 [N + 1]."""
        return len(VIEW_MAGIC) + np.cumsum(np.concatenate([[0], self.payload_bytes]))

    @property
    def left_out(self) -> NDArray[np.int64]:
        """Places of the documents that a reader leaves out, ascending."""
        return np.flatnonzero(self.payload_bytes == 0)


def encode_view_index(index: ViewIndex) -> bytes:
    """Return the index as a parquet file; equal indices give equal bytes.

    Example:
        >>> decode_view_index(encode_view_index(index)).num_tokens.tolist()
        [5, 3, 21]
    """
    columns: list[pa.Array] = []
    for entry in (*_PLACES, *_PAIR):
        values = getattr(index, entry.name)
        is_cuts = entry.type == CUTS
        columns.append(
            encode_cuts(index.cut_starts, values) if is_cuts else pa.array(values, entry.type)
        )
    schema = pa.schema([*_PLACES, *_PAIR], metadata={_VERSION_KEY: str(VIEW_VERSION).encode()})
    sink = io.BytesIO()
    pq.write_table(
        pa.Table.from_arrays(columns, schema=schema),
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(_DELTA_COLUMNS, "DELTA_BINARY_PACKED"),
    )
    return sink.getvalue()


def decode_view_index(data: bytes) -> ViewIndex:
    """Return the index held by a parquet file.

    Raises:
        DamagedShardError: no such parquet file, or columns or values are missing.
        SchemaVersionError: another version of views.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        version = (file.metadata.metadata or {}).get(_VERSION_KEY, b"").decode(errors="replace")
        if version != str(VIEW_VERSION):
            raise SchemaVersionError("view", version, (VIEW_VERSION,), job="vocag add-teacher")
        expected = [f"{entry.name}: {entry.type}" for entry in (*_PLACES, *_PAIR)]
        found = [f"{entry.name}: {entry.type}" for entry in file.schema_arrow]
        if found != expected:
            raise pa.ArrowInvalid(f"its columns are {found}")
        table = file.read()
        values: dict[str, Any] = {}
        for name in table.schema.names:
            values |= decode_column(name, table.column(name))
    except (pa.ArrowException, KeyError, OSError) as error:
        raise DamagedShardError(
            f"the view's index is unreadable ({error}): restore it, or remove and make the view "
            "again"
        ) from error
    return ViewIndex(**values)


def take_view_documents(index: ViewIndex, places: NDArray[np.int64]) -> ViewIndex:
    """Return a view's index of some documents, as of a shard that holds no others.

    Args:
        index: of all of them.
        places: int64 [K], ascending.

    Example:
        >>> take_view_documents(index, np.array([0, 2])).num_tokens.tolist()
        [5, 21]
    """
    counts = np.diff(index.cut_starts)
    of_chosen = np.repeat(np.isin(np.arange(len(index)), places), counts)
    names = ("payload_bytes", "crc32", "num_tokens", "num_mapped", "byte_iou_sum")
    return ViewIndex(
        cut_starts=np.cumsum([0, *counts[places]], dtype=np.int64),
        cut_student=index.cut_student[of_chosen],
        cut_teacher=index.cut_teacher[of_chosen],
        **{name: getattr(index, name)[places] for name in names},
    )


def see_through(index: ShardIndex, view: ViewIndex, side: Side) -> ShardIndex:
    """Return a shard's index with what a view has in the place of its own.

    Where samples lie in the tar stays.

    Raises:
        DamagedShardError: they are not of the same documents.
    """
    if len(view) != len(index):
        raise DamagedShardError(
            f"the view's index has {len(view)} documents, the shard's {len(index)}: restore it, or "
            "remove and make the view again"
        )
    counts: dict[str, Any] = {f"num_{side}_tokens": view.num_tokens}
    return replace(
        index,
        cut_starts=view.cut_starts,
        cut_student=view.cut_student,
        cut_teacher=view.cut_teacher,
        num_mapped=view.num_mapped,
        byte_iou_sum=view.byte_iou_sum,
        **counts,
    )
