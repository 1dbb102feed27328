"""A teacher's losses summarised by document: `*.teacher-<fingerprint>.documents.parquet`.

One table per shard, which follows from its sidecar and index.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.errors import DamagedShardError, SchemaVersionError

DOCUMENT_SCORES_VERSION = 1

FIRST_TOKENS = 32
"""Teacher tokens that `bits_per_byte_later` leaves out."""

WINDOW_TOKENS = 64
"""Teacher tokens per window."""

STORED_COLUMNS = ("bits_per_byte", "bits_per_byte_later", "largest_window", "tokens_per_byte")

COLUMN_VERSIONS = dict.fromkeys(STORED_COLUMNS, 1)
"""The version of each column's numbers; raise it with the table's when they change."""

_VERSION_KEY, _SIDECAR_KEY = b"vocag.document_scores_version", b"vocag.sidecar_sha256"
_SCHEMA = pa.schema(
    [
        ("document_id", pa.string()),
        ("num_text_bytes", pa.uint32()),
        *((name, pa.float32()) for name in STORED_COLUMNS),
    ]
)

ALL_COLUMNS = tuple(_SCHEMA.names)


@dataclass(frozen=True, eq=False)
class DocumentScores:
    """Scores of N documents, float32 [N]; NaN if undefined.

    Attributes:
        bits_per_byte: losses in bits per byte of text.
        bits_per_byte_later: mean loss in bits of tokens after the first `FIRST_TOKENS`, divided by
            the document's bytes per token.
        largest_window: the same of the costliest `WINDOW_TOKENS` losses in a row, or of all if
            fewer.
        tokens_per_byte: teacher tokens per byte of text, even if nothing was scored.
    """

    bits_per_byte: NDArray[np.float32]
    bits_per_byte_later: NDArray[np.float32]
    largest_window: NDArray[np.float32]
    tokens_per_byte: NDArray[np.float32]


def document_scores_name(sidecar: str) -> str:
    """Return the file name of a sidecar's table."""
    return f"{sidecar.removesuffix('.safetensors')}.documents.parquet"


def encode_document_scores(
    scores: DocumentScores,
    *,
    document_id: Sequence[str],
    num_text_bytes: NDArray[np.int64],
    sidecar_sha256: str,
) -> bytes:
    """Encode N documents' scores as parquet, NaN as null; equal scores give equal bytes."""
    columns = [pa.array(document_id, pa.string()), pa.array(num_text_bytes, pa.uint32())]
    columns += [pa.array(getattr(scores, name), from_pandas=True) for name in STORED_COLUMNS]
    metadata = {_VERSION_KEY: str(DOCUMENT_SCORES_VERSION), _SIDECAR_KEY: sidecar_sha256}
    table = pa.Table.from_arrays(columns, schema=_SCHEMA.with_metadata(metadata))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return sink.getvalue()


def decode_document_scores(
    data: bytes, names: Sequence[str], *, sidecar_sha256: str, at: str
) -> Mapping[str, NDArray[Any]]:
    """Return columns of a sidecar's table; NaN for null.

    Raises:
        DamagedShardError: no such table, altered bytes, or made from other losses.
        SchemaVersionError: another version of the format.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        about = file.metadata.metadata or {}
        version = about.get(_VERSION_KEY, b"").decode(errors="replace")
        if version != str(DOCUMENT_SCORES_VERSION):
            job = "vocag score"
            raise SchemaVersionError(at, version, DOCUMENT_SCORES_VERSION, job=job)
        if not file.schema_arrow.equals(_SCHEMA):
            raise pa.ArrowInvalid(f"its columns are {file.schema_arrow.names}")
        if about.get(_SIDECAR_KEY) != sidecar_sha256.encode():
            raise pa.ArrowInvalid("it wasn't made from its sidecar's losses")
        table = file.read(columns=list(names), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedShardError(
            f"{at} is not a table of this score's documents ({error}): delete it and run "
            "vocag score again, which makes it from the losses"
        ) from error
    return {name: table.column(name).to_numpy() for name in names}
