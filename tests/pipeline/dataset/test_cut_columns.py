"""Cut points are what pyarrow reads, and whatever else a file holds is left to pyarrow."""

import io
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dataset import cut_columns
from pipeline.dataset.cut_columns import Scratch, read_cut_columns
from schemas.index import CUTS, decode_index, encode_index
from tests.schemas.test_index import ONE, indices

NAMES = ("cut_starts", "cut_student", "cut_teacher")
OURS = {
    "compression": "zstd",
    "use_dictionary": False,
    "column_encoding": dict.fromkeys(
        ("cut_student.list.element", "cut_teacher.list.element"), "DELTA_BINARY_PACKED"
    ),
}
FRESH = Scratch().take
VALUE = st.integers(0, 40) | st.integers(0, (1 << 32) - 1)
ROWS = st.lists(st.lists(VALUE, max_size=40) | st.just([7] * 100), max_size=30)


def write(rows: list[Any], seed: int = 0, **changed: Any) -> bytes:
    """Return a file of two columns: lists, and others that are as long."""
    rng = np.random.default_rng(seed)
    others = [None if row is None else rng.integers(0, 1 << 32, len(row)).tolist() for row in rows]
    table = pa.table({"cut_student": pa.array(rows, CUTS), "cut_teacher": pa.array(others, CUTS)})
    sink = io.BytesIO()
    pq.write_table(table, sink, **{**OURS, **changed})
    return sink.getvalue()


def read(data: bytes) -> dict[str, np.ndarray[Any, Any]] | None:
    return read_cut_columns(data, pq.ParquetFile(pa.BufferReader(data)).metadata)


def assert_as_pyarrow_reads(data: bytes) -> None:
    found, table = read(data), pq.read_table(pa.BufferReader(data))
    assert found is not None
    for name in NAMES[1:]:
        own, starts = found[name], found["cut_starts"]
        assert (own.dtype, starts.dtype) == (np.uint32, np.int64)
        lists = [own[i:j].tolist() for i, j in pairwise(starts)]
        assert lists == table.column(name).to_pylist()
        assert starts[-1] == len(own)


@given(ROWS, st.integers(0, 9), st.sampled_from([64, 1 << 20]), st.sampled_from([1, 7, 100]))
def test_lists_are_what_pyarrow_reads(
    rows: list[list[int]], seed: int, page_size: int, group_rows: int
) -> None:
    # With pages of one byte pyarrow writes empty ones, which it takes for the end.
    data = write(rows, seed, data_page_size=page_size, write_batch_size=3,
                 row_group_size=group_rows)  # fmt: skip
    if rows:
        assert_as_pyarrow_reads(data)
    else:
        assert read(data) is None or len(read(data)["cut_starts"]) == 1  # type: ignore[index]


@given(st.lists(indices(), min_size=1, max_size=4))
def test_memory_that_is_used_again_holds_what_new_memory_would(many: list[Any]) -> None:
    scratch = Scratch()
    for index in [*many, *many]:
        scratch.clear()
        data = encode_index(index)
        expected, file = read(data), pq.ParquetFile(pa.BufferReader(data)).metadata
        found = read_cut_columns(data, file, scratch)
        assert expected is not None
        assert found is not None
        for name in NAMES:
            np.testing.assert_array_equal(found[name], expected[name])


def test_memory_grows_to_what_one_index_takes_and_is_taken_again() -> None:
    scratch = Scratch()
    scratch.take(100), scratch.take(7)
    rounds = []
    for _ in range(2):
        scratch.clear()
        rounds.append([scratch.take(100), scratch.take(7), scratch.take(1)])
    assert [len(own) for own in rounds[0]] == [100, 7, 1]
    again = [np.shares_memory(one, two) for one, two in zip(*rounds, strict=True)]
    assert again == [False] * 3  # the third was too many, so there is new memory for all
    scratch.clear()
    third = [scratch.take(100), scratch.take(7), scratch.take(1)]
    assert [np.shares_memory(*both) for both in zip(rounds[1], third, strict=True)] == [True] * 3
    assert not any(np.shares_memory(one, two) for one, two in pairwise(third))


def test_a_page_of_another_length_than_its_header_says_is_left_to_pyarrow() -> None:
    data = write([list(range(0, 4000, 9))])
    file = pq.ParquetFile(pa.BufferReader(data)).metadata
    place = file.row_group(0).column(0).data_page_offset
    header, _ = cut_columns._read_struct(data, place)
    told = _varint(2 * header[2])
    assert read(data) is not None
    assert data.find(told, place) == place + 3  # the type before it, and this field's number
    for wrong in (-1, 1):
        other = _varint(2 * (header[2] + wrong))
        assert read(data[: place + 3] + other + data[place + 3 + len(told) :]) is None


def _varint(value: int) -> bytes:
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


@pytest.mark.parametrize("bits", range(33))
def test_every_width_of_steps(bits: int) -> None:
    rng = np.random.default_rng(bits)
    steps = rng.integers(0, 1 << bits, 1000, dtype=np.uint64)
    values = (np.cumsum(steps) % (1 << 32)).tolist()
    assert_as_pyarrow_reads(write([values[:500], [], values[500:]]))


def test_long_lists_over_many_pages() -> None:
    rng = np.random.default_rng(1)
    rows = [np.sort(rng.integers(0, 50_000, count % 90)).tolist() for count in range(500)]
    data = write(rows, data_page_size=2000, write_batch_size=100)
    pages = [
        list(cut_columns._pages(data, pq.ParquetFile(pa.BufferReader(data)).metadata, name, FRESH))
        for name in NAMES[1:]
    ]
    assert min(map(len, pages)) > 6
    assert len({len(own) for own in pages}) == 2  # they break at other places
    assert_as_pyarrow_reads(data)


@given(indices())
def test_an_index_is_the_same_by_either_reader(index: Any) -> None:
    data = encode_index(index)
    expected, found = decode_index(data), decode_index(data, read_cuts=read_cut_columns)
    assert read(data) is not None
    for name in NAMES:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype


@pytest.mark.parametrize(
    "changed",
    [
        {"compression": "snappy"},
        {"compression": "none"},
        {"column_encoding": None},
        {"column_encoding": None, "use_dictionary": True},
        {"data_page_version": "2.0"},
    ],
)
def test_other_layouts_are_left_to_pyarrow(changed: dict[str, Any]) -> None:
    data = write([[1, 2], [], [3]], **changed)
    assert read(data) is None


def test_missing_lists_and_lists_of_other_lengths_are_left_to_pyarrow() -> None:
    assert read(write([[1, 2], None, [3]])) is None
    sink = io.BytesIO()
    lists = {"cut_student": [[1], [2, 3]], "cut_teacher": [[1, 2], [3]]}
    table = pa.table({name: pa.array(rows, CUTS) for name, rows in lists.items()})
    pq.write_table(table, sink, **OURS)
    assert read(sink.getvalue()) is None


def test_altered_bytes_are_never_read_beyond_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of a page altered: some values, or none, and no fault of the process."""
    data = write([[1, 50, 7], [], list(range(0, 4000, 9))])
    file, outcomes = pq.ParquetFile(pa.BufferReader(data)).metadata, set()
    whole = [list(cut_columns._pages(data, file, name, FRESH)) for name in NAMES[1:]]
    for place in range(whole[0][0].num_bytes):
        pages = [[page._replace(data=page.data.copy()) for page in own] for own in whole]
        for own in pages:
            own[0].data[place] ^= 0xFF
        monkeypatch.setattr(
            cut_columns,
            "_pages",
            lambda data, file, name, take, pages=pages: iter(pages[NAMES.index(name) - 1]),
        )
        outcomes.add(read_cut_columns(data, file) is None)
    assert outcomes == {True, False}


def test_an_altered_header_is_left_to_pyarrow_or_read_the_same() -> None:
    data = encode_index(ONE)
    file = pq.ParquetFile(pa.BufferReader(data)).metadata
    expected, refused = read_cut_columns(data, file), 0
    chunk = file.row_group(0).column(8)
    assert expected is not None
    for place in range(chunk.data_page_offset, chunk.data_page_offset + 20):
        altered = bytearray(data)
        altered[place] ^= 0xFF
        found = read_cut_columns(bytes(altered), file)
        refused += found is None
    assert refused > 10
