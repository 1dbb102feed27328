from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import DamagedShardError, SchemaVersionError
from schemas.index import (
    CUTS,
    METADATA_TYPES,
    ShardIndex,
    concatenate_indices,
    decode_index,
    encode_index,
)
from tests.support.documents import assert_same_index

UINT32 = st.one_of(st.integers(0, 100), st.just(0xFFFFFFFF))


@st.composite
def indices(draw: st.DrawFn) -> ShardIndex:
    count = draw(st.integers(0, 5))
    cuts = [sorted(draw(st.lists(UINT32, max_size=4))) for _ in range(count)]
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)

    def column(values: st.SearchStrategy[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), np.int64)

    strings = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    values = {
        "source": (strings, "string"),
        "meta.score": (st.none() | st.floats(allow_nan=False), "float64"),
        "year": (st.none() | st.integers(-(1 << 63), (1 << 63) - 1), "int64"),
        "is good": (st.none() | st.booleans(), "bool"),
    }
    return ShardIndex(
        key=[f"{place:032x}" for place in range(count)],
        document_id=draw(st.lists(names, min_size=count, max_size=count)),
        payload_offset=column(st.integers(0, 1 << 50)),
        **{
            name: column(UINT32)
            for name in (
                *("payload_bytes", "crc32", "num_text_bytes"),
                *("num_student_tokens", "num_teacher_tokens"),
            )
        },
        cut_starts=np.cumsum([0, *map(len, cuts)], dtype=np.int64),
        cut_student=np.array([cut for own in cuts for cut in own], np.int64),
        cut_teacher=np.array([cut // 2 for own in cuts for cut in own], np.int64),
        num_mapped=column(UINT32),
        byte_iou_sum=column(st.integers(0, 1000)).astype(np.float32) / 7,
        metadata={
            name: metadata(draw(st.lists(own, min_size=count, max_size=count)), kind)
            for name, (own, kind) in values.items()
        },
    )


def metadata(values: list[Any], kind: str) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, METADATA_TYPES[kind])])


ONE = ShardIndex(
    key=["0" * 32],
    document_id=["a"],
    payload_offset=np.array([512]),
    payload_bytes=np.array([100]),
    crc32=np.array([7]),
    num_text_bytes=np.array([30]),
    num_student_tokens=np.array([20]),
    num_teacher_tokens=np.array([10]),
    cut_starts=np.array([0, 2]),
    cut_student=np.array([15, 19]),
    cut_teacher=np.array([7, 9]),
    num_mapped=np.array([18]),
    byte_iou_sum=np.array([15.5], np.float32),
    metadata={"meta.score": metadata([0.5], "float64"), "source": metadata(["web"], "string")},
)


@given(indices())
def test_round_trip(index: ShardIndex) -> None:
    assert_same_index(decode_index(encode_index(index)), index)
    assert encode_index(index) == encode_index(decode_index(encode_index(index)))


def test_names_can_be_left_out() -> None:
    found = decode_index(encode_index(ONE), with_names=False)
    assert (list(found.key), list(found.document_id)) == ([], [])
    assert len(found) == 1
    assert found.cut_student.tolist() == [15, 19]
    assert (found.metadata, len(found.num_mapped), len(found.byte_iou_sum)) == ({}, 0, 0)


def test_metadata_is_read_field_by_field() -> None:
    found = decode_index(encode_index(ONE), with_names=False, metadata=["source"])
    assert {name: values.to_pylist() for name, values in found.metadata.items()} == {
        "source": ["web"]
    }
    with pytest.raises(DamagedShardError, match=r"metadata\.other"):
        decode_index(encode_index(ONE), metadata=["other"])


def test_strings_are_numbered_as_they_come() -> None:
    parts = [replace(ONE, metadata={"s": metadata([s], "string")}) for s in ("b", "a", "b")]
    whole = concatenate_indices(parts)
    at_once = replace(whole, metadata={"s": metadata(["b", "a", "b"], "string")})
    assert encode_index(whole) == encode_index(at_once)


@given(st.lists(indices(), max_size=4))
def test_concatenation_keeps_every_row(parts: list[ShardIndex]) -> None:
    whole = concatenate_indices(parts)
    assert len(whole) == sum(map(len, parts))
    row = 0
    for part in parts:
        for own in range(len(part)):
            assert whole.document_id[row] == part.document_id[own]
            assert whole.payload_offset[row] == part.payload_offset[own]
            cuts = whole.cut_student[whole.cut_starts[row] : whole.cut_starts[row + 1]]
            expected = part.cut_student[part.cut_starts[own] : part.cut_starts[own + 1]]
            np.testing.assert_array_equal(cuts, expected)
            row += 1
    assert whole.cut_starts[-1] == len(whole.cut_student) == len(whole.cut_teacher)


def test_cut_points_of_both_sides_come_in_pairs() -> None:
    table = pq.read_table(pa.BufferReader(encode_index(ONE)))
    place = table.schema.get_field_index("cut_student")
    fewer = pa.array([table["cut_student"][0].as_py()[:1]], CUTS)
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(place, table.schema.field(place), fewer), sink)
    with pytest.raises(DamagedShardError, match="cut_student and cut_teacher differ in length"):
        decode_index(sink.getvalue().to_pybytes(), with_names=False)


def test_what_does_not_fit_its_column_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid, match=r"4294967296|not in range|overflow"):
        encode_index(replace(ONE, num_text_bytes=np.array([1 << 32])))
    with pytest.raises(ValueError, match="num_mapped has 0 values for 1 documents"):
        encode_index(replace(ONE, num_mapped=np.empty(0, np.int64)))
    with pytest.raises(ValueError, match="source has 2 values for 1 documents"):
        encode_index(replace(ONE, metadata={"source": metadata(["a", "b"], "string")}))


def test_every_column_is_required_and_documented() -> None:
    table = pq.read_table(pa.BufferReader(encode_index(ONE)))
    expected = {field.name for field in fields(ShardIndex)} - {"cut_starts", "metadata", "chats"}
    assert set(table.column_names) == expected | {"metadata.meta.score", "metadata.source"}
    assert table.schema.metadata[b"vocag.schema_version"] == b"2"


class TestDamage:
    def test_every_cut_is_noticed(self) -> None:
        data = encode_index(ONE)
        for size in range(0, len(data), 7):
            with pytest.raises(DamagedShardError, match=r"shard index is unreadable.*restore it"):
                decode_index(data[:size])

    @pytest.mark.parametrize("version", [b"1", b"3", b"\xff", None])
    def test_another_version(self, version: bytes | None) -> None:
        metadata = {} if version is None else {b"vocag.schema_version": version}
        table = pq.read_table(pa.BufferReader(encode_index(ONE))).replace_schema_metadata(metadata)
        with pytest.raises(SchemaVersionError, match="shard index has schema version"):
            decode_index(_parquet(table))

    def test_missing_or_foreign_columns(self) -> None:
        table = pq.read_table(pa.BufferReader(encode_index(ONE)))
        with pytest.raises(DamagedShardError, match=r"its columns differ in \['crc32: uint32'\]"):
            decode_index(_parquet(table.drop_columns(["crc32"])))
        floats = table.set_column(2, "payload_offset", pa.array([512.0]))
        with pytest.raises(DamagedShardError, match=r"payload_offset: double"):
            decode_index(_parquet(floats))
        lists = table.append_column("metadata.tags", pa.array([["a"]]))
        with pytest.raises(DamagedShardError, match=r"metadata\.tags: list"):
            decode_index(_parquet(lists))

    def test_missing_values(self) -> None:
        table = pq.read_table(pa.BufferReader(encode_index(ONE)))
        nulls = table.set_column(4, table.schema.field("crc32"), pa.array([None], pa.uint32()))
        with pytest.raises(DamagedShardError, match="crc32 has missing values"):
            decode_index(_parquet(nulls))


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())
