"""The table of documents' scores: it comes back as it was written, or not at all."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest

from schemas.document_score_table import (
    ALL_COLUMNS,
    STORED_COLUMNS,
    DocumentScores,
    decode_document_scores,
    document_scores_name,
    encode_document_scores,
)
from schemas.errors import DamagedShardError, DatasetError, SchemaVersionError

SIDECAR = "ab" * 32
NAMES = [f"train/{number}" for number in range(9)]


def encoded(values: np.ndarray) -> bytes:
    return encode_document_scores(
        DocumentScores(*values.astype(np.float32)),
        document_id=NAMES,
        num_text_bytes=np.arange(9),
        sidecar_sha256=SIDECAR,
    )


def decoded(data: bytes, sidecar: str = SIDECAR) -> dict[str, np.ndarray]:
    return dict(decode_document_scores(data, ALL_COLUMNS, sidecar_sha256=sidecar, at="x"))


def test_a_table_comes_back_and_others_read_it() -> None:
    values = np.random.default_rng(0).random((4, 9))
    values[1, 3] = np.nan
    data = encoded(values)
    assert data == encoded(values)
    found = decoded(data)
    for name, row in zip(STORED_COLUMNS, values, strict=True):
        np.testing.assert_array_equal(found[name], row.astype(np.float32))
    table = pq.read_table(io.BytesIO(data))  # as pandas and DuckDB do
    assert table["document_id"].to_pylist() == NAMES
    assert table["bits_per_byte_later"].null_count == 1
    sidecar = "c-000000-of-000001.teacher-ab12.safetensors"
    assert document_scores_name(sidecar) == "c-000000-of-000001.teacher-ab12.documents.parquet"


def test_no_altered_bit_changes_a_number() -> None:
    data = encoded(np.random.default_rng(1).random((4, 9)))
    right, num_refused = decoded(data), 0
    for place in range(len(data)):
        altered = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        try:
            found = decoded(altered)
        except DatasetError:
            num_refused += 1
        else:
            assert all(np.array_equal(found[name], right[name]) for name in right)
    assert num_refused > 800


def test_other_losses_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(np.zeros((4, 9)))
    with pytest.raises(DamagedShardError, match=r"x is not a table .*from its sidecar's losses"):
        decoded(data, "cd" * 32)
    monkeypatch.setattr("schemas.document_score_table.DOCUMENT_SCORES_VERSION", 2)
    with pytest.raises(SchemaVersionError, match=r"x has schema version '1'; .* version 2"):
        decoded(data)
