"""Documents in the shards that readers skip: `removed-g001.parquet`."""

import io
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.errors import DamagedShardError

_SCHEMA = pa.schema([("shard", pa.uint32()), ("document", pa.uint32())])


@dataclass(frozen=True, eq=False)
class RemovedDocuments:
    """K documents, int64 [K], by number of shard and place in its index, ascending."""

    shard: NDArray[np.int64]
    document: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shard)

    def of_shard(self, shard_index: int) -> NDArray[np.int64]:
        """Return one shard's places, ascending."""
        start, stop = np.searchsorted(self.shard, [shard_index, shard_index + 1])
        return self.document[start:stop]


def encode_removed(removed: RemovedDocuments) -> bytes:
    """Encode the list as parquet; equal lists give equal bytes."""
    sink = io.BytesIO()
    columns = [pa.array(removed.shard, pa.uint32()), pa.array(removed.document, pa.uint32())]
    table = pa.Table.from_arrays(columns, schema=_SCHEMA)
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    return sink.getvalue()


def decode_removed(data: bytes) -> RemovedDocuments:
    """Decode the list.

    Raises:
        DamagedShardError: no such list, or unsorted or repeated documents.
    """
    try:
        table = pq.read_table(pa.BufferReader(data))
        if table.schema.names != _SCHEMA.names or table.schema.types != _SCHEMA.types:
            raise pa.ArrowInvalid(f"its columns are {table.schema.names}")
        shard, document = (table.column(name).to_numpy().astype(np.int64) for name in _SCHEMA.names)
        if np.any(np.diff((shard << 32) + document) <= 0):
            raise pa.ArrowInvalid("its documents are not in order, or one is there twice")
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DamagedShardError(
            f"the list of removed documents is unreadable ({error}): restore it"
        ) from error
    return RemovedDocuments(shard, document)
