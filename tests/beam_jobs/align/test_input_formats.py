"""Documents in every format that people have, whole, bad and cut."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_jobs import storage
from beam_jobs.align.inputs import json_values
from beam_jobs.align.inputs.arrow_rows import rows_of
from beam_jobs.align.inputs.decompression import DamageError, zstd
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import (
    DeadLetter,
    MetadataField,
    PlacedDocument,
    ReadingRules,
    Reason,
)
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.json_values import split_values
from beam_jobs.align.inputs.parts import InputPart
from beam_jobs.align.inputs.text_templates import parse_template
from beam_jobs.job_errors import InputError
from pipeline.command_line.failures import hints_of

TEXTS = [f"text {n}: ∑ 'quoted' \"twice\", with\nlines\t{{[ \\" for n in range(30)]
RECORDS = [{"id": f"doc-{n}", "text": text, "n": {"a": [n]}} for n, text in enumerate(TEXTS)]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def read(path: Path, rules: ReadingRules | None = None, **options: Any) -> list[Any]:
    """Read a file as the job would: found, looked at, in one part."""
    rules = rules or ReadingRules()
    (file,) = find_inputs([str(path)], fields=rules.text_fields, **options)
    return list(read_part(InputPart(file), rules))


def texts_of(outcomes: list[Any]) -> list[str]:
    return [o.text.decode() if isinstance(o, PlacedDocument) else o.reason for o in outcomes]


def write_csv(path: Path, rows: list[list[str]], **options: Any) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **options).writerows(rows)
    path.write_bytes(text.getvalue().encode())
    return path.read_bytes()


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
def test_an_array_is_read_element_by_element(tmp_path: Path, name: str, indent: int | None) -> None:
    data = json.dumps(RECORDS, indent=indent, ensure_ascii=False).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    documents = read(tmp_path / name)
    assert [d.document_id for d in documents] == [f"doc-{n}" for n in range(30)]
    assert texts_of(documents) == TEXTS
    decode = json.JSONDecoder().raw_decode
    assert [decode(data[d.position :].decode())[0] for d in documents] == RECORDS


def test_a_bad_element_costs_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    start = b'[{"text": "one"}, {"text": tru}, 7, "str", [1, {"text": "x"}], {"text": "big '
    path.write_bytes(start + b"y" * 9000 + b'"}, {"text": NaN}, {"text": "last"}]')
    rules = ReadingRules(max_document_bytes=2000)
    assert texts_of(read(path, rules)) == [
        *("one", "bad_json", "bad_json", "bad_json", "bad_json", "too_large", "missing_text"),
        "last",
    ]


def test_a_cut_array_keeps_what_is_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    data = json.dumps(RECORDS[:3]).encode()
    kept = set()
    for num_bytes in range(2, len(data)):
        path.write_bytes(data[:num_bytes])
        *documents, last = read(path)
        assert texts_of(documents) == TEXTS[: len(documents)]
        assert last.reason == Reason.UNREADABLE_INPUT
        assert "cut after" in last.detail
        kept.add(len(documents))
    assert kept == {0, 1, 2, 3}


TEXT = pa.schema([("text", pa.string())])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text('ab"\\[]{}, é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@given(
    values=st.lists(VALUES, max_size=5), indent=st.sampled_from([None, 2]), chunk=st.integers(1, 9)
)
def test_values_are_what_json_says_they_are(
    values: list[Any], indent: int | None, chunk: int
) -> None:
    data = json.dumps(values, indent=indent, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_CHUNK_BYTES", chunk)
        whole = list(split_values(io.BytesIO(data), 1 << 20))
        short = list(split_values(io.BytesIO(data), 8))
        with pytest.raises(DamageError):
            list(split_values(io.BytesIO(data[:-1]), 8))
    assert [value.record for value in whole] == values
    assert [value[:2] for value in short] == [value[:2] for value in whole]
    for value, record in zip(short, values, strict=True):
        assert json.loads(data[value.position :][: value.num_bytes]) == record
        assert value.record == (record if value.num_bytes <= 8 else None)
        assert (value.error is None) == (value.num_bytes <= 8)


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("a.json", json.dumps(RECORDS[4], indent=2), TEXTS[4:5]),
        ("a.json", '{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        ("a.jsonl", '\ufeff [{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
        ("a.jsonl", "[1, 2]\n[3, 4]\n", ["bad_json", "bad_json"]),  # lines of lists
        ("a.jsonl", '{"text": ', ["bad_json"]),
    ],
)
def test_lines_are_told_from_values(tmp_path: Path, name: str, data: str, texts: list[str]) -> None:
    (tmp_path / name).write_text(data, "utf-8")
    assert texts_of(read(tmp_path / name)) == texts


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_compression_and_its_cuts(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps(record).encode() + b"\n" for record in RECORDS]
    stored = b"".join(map(COMPRESS[suffix], [b"".join(lines[:20]), b"".join(lines[20:])]))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(stored)
    assert texts_of(read(path)) == TEXTS
    first = len(COMPRESS[suffix](b"".join(lines[:20])))
    for num_bytes in (*range(1, len(stored), 17), first - 1, first + 7, len(stored) - 1):
        if num_bytes == first:
            continue  # a whole file
        path.write_bytes(stored[:num_bytes])
        *documents, last = read(path)
        assert texts_of(documents) == TEXTS[: len(documents)]
        assert last.reason == Reason.UNREADABLE_INPUT
        assert f"cut after {num_bytes} bytes" in last.detail
        assert len(documents) >= 20 * (num_bytes > first)
    altered = bytearray(stored)
    altered[len(altered) // 4] ^= 0xFF
    path.write_bytes(altered)
    assert read(path)[-1].reason in (Reason.UNREADABLE_INPUT, Reason.BAD_JSON)
    # `bz2.open` and `lzma.open` leave a damaged second stream out and say nothing.
    path.write_bytes(stored[:first] + b"?" + stored[first + 1 :])
    *documents, last = read(path)
    assert texts_of(documents) == TEXTS[:20]
    assert last.reason == Reason.UNREADABLE_INPUT


@pytest.mark.parametrize("suffix", COMPRESS)
def test_zeros_behind_a_compressed_stream_are_padding(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps(record).encode() + b"\n" for record in RECORDS]
    first, second = (COMPRESS[suffix](b"".join(part)) for part in (lines[:20], lines[20:]))
    path = tmp_path / f"a.jsonl{suffix}"
    for padding in (4, 512, 300_000):  # xz allows multiples of 4, tapes fill blocks
        path.write_bytes(first + bytes(padding) + second + bytes(padding))
        assert texts_of(read(path)) == TEXTS
    path.write_bytes(first + bytes(512) + second + bytes(512) + b"more")
    *documents, last = read(path)
    assert texts_of(documents) == TEXTS
    assert last.reason == Reason.UNREADABLE_INPUT


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_small_file_of_a_huge_text_is_not_held_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](bytes(32 << 20)))
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    (letter,) = read(path, ReadingRules(max_document_bytes=1 << 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert letter.reason == Reason.TOO_LARGE
    assert peak < 16 << 20


@pytest.mark.parametrize("name", ["README.md", "a.html.gz"])
def test_any_name_can_be_read_as_text(tmp_path: Path, name: str) -> None:
    data = TEXTS[0].encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(InputError, match=r"no known kind.*--format text"):
        read(tmp_path / name)
    (document,) = read(tmp_path / name, format="text")
    assert (document.text.decode(), document.document_id) == (TEXTS[0], f"{name}#0")


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.xz", ",")]
)
def test_csv(tmp_path: Path, name: str, delimiter: str) -> None:
    rows = [[r["id"], "x", r["text"]] for r in RECORDS]
    data = write_csv(tmp_path / name, [["id", "other", "text"], *rows], delimiter=delimiter)
    if name.endswith(".xz"):
        (tmp_path / name).write_bytes(lzma.compress(b"\xef\xbb\xbf" + data))
    documents = read(tmp_path / name)
    assert texts_of(documents) == TEXTS
    assert [d.document_id for d in documents] == [r["id"] for r in RECORDS]
    assert [d.position for d in documents] == list(range(30))


def test_bad_rows_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,id\none,1\n\ntwo\nth\xffree,3\n,4\nfive,\n"six"x,6\nseven,7\n')
    outcomes = read(path)
    assert texts_of(outcomes) == [
        *("one", "bad_row", "invalid_unicode", "empty_text", "five", "bad_row", "seven")
    ]
    assert [o.position for o in outcomes] == list(range(7))
    assert outcomes[1].detail == "the row has 1 columns, the header 2"
    assert outcomes[4].document_id == "a.csv#4"


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "b.csv", [["text", "text"], ["x", "y"]])
    with pytest.raises(InputError, match='several columns "text"'):
        read(tmp_path / "b.csv")


def write_arrow(path: Path, table: pa.Table, *, is_stream: bool, batch: int = 7) -> bytes:
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with path.open("wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path.read_bytes()


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_arrow_streams_and_files(tmp_path: Path, is_stream: bool, kind: pa.DataType) -> None:
    table = pa.table({"id": list(range(30)), "text": pa.array(TEXTS).cast(kind), "other": TEXTS})
    write_arrow(tmp_path / "a.arrow", table, is_stream=is_stream)
    documents = read(tmp_path / "a.arrow")
    assert texts_of(documents) == TEXTS
    assert [d.document_id for d in documents] == [str(n) for n in range(30)]
    assert [d.position for d in documents] == list(range(30))


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_cut_arrow_file_never_passes_for_a_whole_one(tmp_path: Path, is_stream: bool) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"text": TEXTS})
    data = write_arrow(path, table, is_stream=is_stream)
    kept = set()
    for num_bytes in range(0, len(data), 24):
        path.write_bytes(data[:num_bytes])
        *documents, last = read(path)
        assert texts_of(documents) == TEXTS[: len(documents)]
        assert (last.reason, last.position) == (Reason.UNREADABLE_INPUT, len(documents))
        kept.add(len(documents))
    assert kept == ({0, 7, 14, 21, 28, 30} if is_stream else {0})


def test_arrow_offsets_outside_their_buffer_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    texts = [b"a" * 0x1234, b"b" * 0x1111]
    data = write_arrow(path, pa.table({"text": texts}).cast(TEXT), is_stream=True)
    middle, end = (n.to_bytes(4, "little") for n in (0x1234, 0x1234 + 0x1111))
    assert data.count(middle + end) == 1
    path.write_bytes(data.replace(middle + end, b"\x00\x00\x00\x7f" + end))
    (letter,) = read(path)
    assert letter.reason == Reason.UNREADABLE_INPUT


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    """The layout that `datasets` 4 writes: Arrow streams, named by `state.json`."""
    split = tmp_path / "saved" / "train"
    split.mkdir(parents=True)
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (slice(0, 10), slice(10, 30)), strict=True):
        table = pa.table({"question": TEXTS[part]})
        write_arrow(split / name, table, is_stream=True)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (split / "state.json").write_text(json.dumps(state))
    (split / "dataset_info.json").write_text("{}")
    (split / "cache-0.arrow").write_bytes(b"not part of it")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    files = find_inputs([f"{split}/"], fields=("question",))
    assert [file.source for file in files] == names
    rules = ReadingRules("question")
    found = [document for file in files for document in read_part(InputPart(file), rules)]
    assert texts_of(found) == TEXTS
    with pytest.raises(InputError, match=r"holds the splits train, test: name .*saved/train"):
        find_inputs([str(tmp_path / "saved")])
    (split / names[1]).unlink()
    with pytest.raises(InputError, match="matches no file"):
        find_inputs([str(split)], fields=("question",))


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize("other", ['{"step": 3}', "[1]", '{"splits": 1, "_data_files": [2]}', "{"])
def test_a_folder_with_another_programs_file_is_a_folder(
    tmp_path: Path, name: str, other: str
) -> None:
    (tmp_path / name).write_text(other)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="is a folder: name its files, such as"):
        find_inputs([str(tmp_path)])


def test_ids_of_a_column_that_pandas_made_floats(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    ids = pa.array([0.0, float("nan"), None, 3.0, 4.5, 2.0**60])
    pq.write_table(pa.table({"id": ids, "text": list("abcdef")}), path)
    outcomes = read(path)
    assert [o.document_id for o in outcomes[:4]] == ["0", "a.parquet#1", "a.parquet#2", "3"]
    assert [o.reason for o in outcomes[4:]] == [Reason.BAD_ID, Reason.BAD_ID]


def test_ids_that_are_times_decimals_or_uuids_are_text(tmp_path: Path) -> None:
    """Nanoseconds have no type in Python; what is read must not depend on pandas."""
    when, uuid = datetime(2024, 5, 6, 7, 8, 9), UUID(int=7)
    columns = {
        "2024-05-06 07:08:09.000000": pa.array([when], pa.timestamp("us")),
        "2024-05-06 07:08:09.000000Z": pa.array([when], pa.timestamp("us", "Europe/Berlin")),
        "2023-11-14 22:13:20.123456789": pa.array([1700000000123456789], pa.timestamp("ns")),
        "2024-05-06": pa.array([when.date()]),
        "12.50": pa.array([Decimal("12.50")]),
        str(uuid): pa.array([uuid.bytes], pa.uuid()),
    }
    for expected, column in columns.items():
        table = pa.table({"id": column, "text": ["x"]})
        pq.write_table(table, tmp_path / "a.parquet")
        write_arrow(tmp_path / "a.arrow", table, is_stream=False)
        for name in ("a.parquet", "a.arrow"):
            (document,) = read(tmp_path / name)
            assert document.document_id == expected


def test_a_row_group_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Noting(io.FileIO):
        def read(self, size: int = -1, /) -> bytes:
            sizes.append(size)
            return super().read(size)

    path, texts = tmp_path / "a.parquet", [os.urandom(5000).hex() for _ in range(1000)]
    table = pa.table({"text": texts})
    pq.write_table(table, path, use_dictionary=False, write_batch_size=10)
    (file,) = find_inputs([str(path)])
    monkeypatch.setattr(storage, "open_to_read", Noting)
    found = list(read_part(InputPart(file), ReadingRules()))
    assert [document.text.decode() for document in found] == texts
    assert path.stat().st_size > 5_000_000
    assert max(sizes) < 2_000_000


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.timestamp("s"), 10**15, "<value out of range: 1000000000000000>"),
        (pa.timestamp("s", "Foo/Bar"), 1, "1970-01-01 00:00:01Z"),
        (pa.timestamp("ns"), 1, "1970-01-01 00:00:00.000000001"),
        (pa.date32(), 10**9, "<value out of range: 1000000000>"),
        (pa.duration("s"), 10**15, "1000000000000000"),
    ],
)
def test_times_that_python_lacks_next_to_a_text_cost_nothing(
    tmp_path: Path, kind: pa.DataType, value: int, text: str
) -> None:
    """Of an Arrow file a nested field brings its siblings, of a parquet file a list does."""
    times = pa.array([None, value], kind)
    pairs = pa.StructArray.from_arrays([pa.array(["x", "y"]), times], ["body", "when"])
    lists = pa.ListArray.from_arrays([0, 1, 2], pairs)
    table = pa.table({"meta": pairs, "all": lists, "text": ["x", "y"]})
    write_arrow(tmp_path / "a.arrow", table, is_stream=False)
    rules = ReadingRules(text_field="meta.body", metadata=(MetadataField("meta.when"),))
    found = read(tmp_path / "a.arrow", rules)
    assert [(d.text, d.metadata) for d in found] == [(b"x", (None,)), (b"y", (text,))]
    (rows,) = map(rows_of, table.select(["all"]).to_batches())
    assert [row["all"][0]["when"] for row in rows] == [None, text]


def test_a_field_of_a_map_is_read(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.float64())
    table = pa.table({"text": ["x", "y"], "meta": pa.array([[("score", 0.5)], []], kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table, is_stream=True)
    rules = ReadingRules(metadata=(MetadataField("meta.score", "float64"),))
    for name in ("a.parquet", "a.arrow"):
        assert [d.metadata for d in read(tmp_path / name, rules)] == [(0.5,), (None,)]


def test_feather_1_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    (letter,) = read(tmp_path / "a.feather")
    assert (letter.reason, "Feather 1" in letter.detail) == (Reason.UNREADABLE_INPUT, True)


def test_text_joined_from_several_fields(tmp_path: Path) -> None:
    rules = ReadingRules(text_template=r"Q: {question}\nA: {a.b}\\{{1}}\t!")
    assert rules.text_fields == ("question", "a.b")
    path = tmp_path / "a.jsonl"
    records = [
        {"question": "1 + 1?", "a": {"b": "2"}},
        {"question": "2 + 2?"},
        {"question": "3 + 3?", "a": {"b": 6}},
        {"question": "", "a": {"b": ""}},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    outcomes = read(path, rules)
    assert texts_of(outcomes) == [
        "Q: 1 + 1?\nA: 2\\{1}\t!",
        Reason.MISSING_TEXT,
        Reason.TEXT_NOT_A_STRING,
        "Q: \nA: \\{1}\t!",
    ]
    assert isinstance(outcomes[1], DeadLetter)
    assert outcomes[1].detail == 'no "a.b" in the record, which has "question"'
    pq.write_table(pa.table({"question": ["x"], "a": [{"b": "y", "c": 1}]}), tmp_path / "a.parquet")
    assert texts_of(read(tmp_path / "a.parquet", rules)) == ["Q: x\nA: y\\{1}\t!"]
    values = pa.array([{"b": each} for each in (b"y", b"", b"\xff")])
    pq.write_table(pa.table({"question": ["x"] * 3, "a": values}), tmp_path / "b.parquet")
    expected = ["Q: x\nA: y\\{1}\t!", "Q: x\nA: \\{1}\t!", Reason.INVALID_UNICODE]
    assert texts_of(read(tmp_path / "b.parquet", rules)) == expected
    with pytest.raises(InputError, match='has no column "other"'):
        read(tmp_path / "a.parquet", ReadingRules(text_template="{question}{other}"))


def test_templates_that_mean_nothing() -> None:
    for template in ("plain", "{a", "a}", r"\q{a}"):
        with pytest.raises(ValueError, match=r"names no field|means nothing"):
            parse_template(template)


def test_a_generator_of_files_is_found_below_links(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "deep" / "a.txt").write_text("a")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "deep" / "loop").symlink_to(tmp_path / "real")
    files = find_inputs([f"{tmp_path}/in/**"])
    assert [file.source for file in files] == ["linked/deep/a.txt"]
    assert os.path.samefile(files[0].path, tmp_path / "real" / "deep" / "a.txt")


def test_strings_that_a_table_holds_as_bytes_are_ids_and_metadata(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": pa.array(["é-1".encode(), b"b-2", b"\xff"]),
            "text": ["one", "two", "three"],
            "source": pa.array([b"web", b"x", b"y"]),
        }
    )
    rules = ReadingRules(metadata=(MetadataField("source", "string"),))
    pq.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table, is_stream=False)
    for name in ("a.parquet", "a.arrow"):
        *documents, letter = read(tmp_path / name, rules)
        assert [(d.document_id, d.metadata) for d in documents] == [
            ("é-1", ("web",)),
            ("b-2", ("x",)),
        ]
        assert (letter.reason, "bytes that aren't UTF-8" in letter.detail) == (Reason.BAD_ID, True)


def test_ids_of_bytes_of_one_length_are_hexadecimal(tmp_path: Path) -> None:
    ids = [b"0123", b"\xff\x00ab", None]
    table = pa.table({"id": pa.array(ids, pa.binary(4)), "text": ["one", "two", "three"]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert [d.document_id for d in read(tmp_path / "a.parquet")] == [
        "30313233",
        "ff006162",
        "a.parquet#2",
    ]


def test_dialects_of_csv_are_read_through(tmp_path: Path) -> None:
    rows = ["id,text,source", r'a,"say \"hi\", she",web', "b,two", "c,three,x,", ""]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    rules = ReadingRules(metadata=(MetadataField("source", "string"),))
    assert [(d.document_id, d.text, d.metadata) for d in read(tmp_path / "a.csv", rules)] == [
        ("a", b'say "hi", she', ("web",)),
        ("b", b"two", (None,)),
        ("c", b"three", ("x",)),
    ]


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("id;text", 'delimiter=";"'),
        ("id\ttext", "--format tsv"),
        ("id,body,n", "--text-field body"),
    ],
)
def test_a_table_without_the_column_names_the_remedy(
    tmp_path: Path, header: str, hint: str
) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,the longest,2\n")
    with pytest.raises(InputError, match=r'a\.csv has no column "text", it has "id') as caught:
        read(tmp_path / "a.csv")
    assert hint in "".join(hints_of(caught.value))
    if "--text-field" in hint:
        assert texts_of(read(tmp_path / "a.csv", ReadingRules("body", "n"))) == ["the longest"]
