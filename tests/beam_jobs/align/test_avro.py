"""Avro files as input, and that a format of input files is one entry of a list."""

import datetime
import io
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import fastavro
import pytest

from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import DeadLetter, MetadataField, ReadingRules, Reason
from beam_jobs.align.inputs.formats import FORMATS, describe_formats, name_suffixes
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.parts import InputPart
from beam_jobs.align.inputs.tables import count_rows, read_rows
from beam_jobs.job_errors import InputError

META = {
    "type": "record",
    "name": "Meta",
    "fields": [{"name": "score", "type": "double"}, {"name": "site", "type": ["null", "string"]}],
}
SCHEMA = {
    "type": "record",
    "name": "Page",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "text", "type": ["null", "string"]},
        {"name": "meta", "type": META},
    ],
}
RECORDS = [
    {"id": f"doc-{n}", "text": f"text {n} ∑", "meta": {"score": n / 2, "site": None}}
    for n in range(300)
]


def write(
    path: Path, schema: Any, records: Sequence[Any], *, block_bytes: int = 1000, codec: str = "null"
) -> bytes:
    file = io.BytesIO()
    fastavro.writer(file, schema, records, codec=codec, sync_interval=block_bytes)
    path.write_bytes(file.getvalue())
    return file.getvalue()


def part_of(path: Path, fields: Sequence[str] = ("text",)) -> InputPart:
    (file,) = find_inputs([str(path)], fields=fields)
    return InputPart(file)


def with_text(kind: Any) -> dict[str, Any]:
    return {"type": "record", "name": "Page", "fields": [{"name": "text", "type": kind}]}


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz", "zstandard"])
@pytest.mark.parametrize("name", ["a.avro", "a.jsonl"])
def test_documents_have_row_numbers_ids_and_nested_metadata(
    tmp_path: Path, name: str, codec: str
) -> None:
    """By the first bytes, if the name says something else."""
    write(tmp_path / name, SCHEMA, RECORDS, codec=codec)
    rules = ReadingRules(
        metadata=(MetadataField("meta.score", "float64"), MetadataField("meta.site", "string"))
    )
    part = part_of(tmp_path / name)
    assert part.file.format == "avro"
    documents = list(read_part(part, rules))
    assert [d.text.decode() for d in documents] == [record["text"] for record in RECORDS]
    assert [d.document_id for d in documents] == [record["id"] for record in RECORDS]
    assert [d.position for d in documents] == list(range(300))
    assert [d.metadata for d in documents] == [(n / 2, None) for n in range(300)]


def test_rows_are_counted_by_blocks(tmp_path: Path) -> None:
    write(tmp_path / "a.avro", SCHEMA, RECORDS)
    assert count_rows(part_of(tmp_path / "a.avro")) == (300, None)


def test_a_cut_file_keeps_its_whole_blocks(tmp_path: Path) -> None:
    """At a block's end a cut can't be seen: nothing in the format says that more should come."""
    path = tmp_path / "a.avro"
    data = write(path, SCHEMA, RECORDS[:60], block_bytes=400)
    blocks = list(fastavro.block_reader(io.BytesIO(data)))
    header = blocks[0].offset
    ends = {block.offset + block.size for block in blocks} | {header}
    assert len(blocks) >= 5
    part = part_of(path)
    for num_bytes in range(header, len(data)):
        path.write_bytes(data[:num_bytes])
        *rows, last = [*read_rows(part, ["text"], max_cell_bytes=1000), None]
        if num_bytes not in ends:
            *rows, last = rows
            assert last is not None
            position, error = last
            assert position == len(rows)
            assert error.reason == Reason.UNREADABLE_INPUT
        kept = sum(b.num_records for b in blocks if b.offset + b.size <= num_bytes)
        assert [row["text"] for _, row in rows] == [r["text"] for r in RECORDS[:kept]]
        assert count_rows(part)[0] in (0, kept)


def test_a_cut_header_is_unreadable_input(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    data = write(path, SCHEMA, RECORDS[:3])
    for num_bytes in (0, 3, 4, 5, 40, 200):
        path.write_bytes(data[:num_bytes])
        (file,) = find_inputs([str(path)], fields=["text"])
        (letter,) = read_part(InputPart(file), ReadingRules())
        assert isinstance(letter, DeadLetter)
        assert letter.reason == Reason.UNREADABLE_INPUT
        assert count_rows(InputPart(file)) == (0, None)


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz", "zstandard"])
def test_every_changed_byte_costs_rows_at_most(tmp_path: Path, codec: str) -> None:
    """Whatever the library does with damaged bytes is a dead letter, or rows of other values."""
    path = tmp_path / "a.avro"
    data = write(path, SCHEMA, RECORDS[:20], block_bytes=200, codec=codec)
    part = part_of(path)
    num_letters = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        rows = list(read_rows(part, ["text", "meta"], max_cell_bytes=1000))
        num_letters += any(not isinstance(row, dict) for _, row in rows)
        count_rows(part)
    assert num_letters > len(data) // 4


def test_a_block_that_cannot_be_decoded_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    data = bytearray(write(path, SCHEMA, RECORDS[:60], block_bytes=400))
    first, second, *_ = fastavro.block_reader(io.BytesIO(data))
    place = data.index(b"\x02", data.index(str(RECORDS[first.num_records]["id"]).encode()))
    data[place] = 0x08  # the text's branch of its union: there is no fifth
    path.write_bytes(data)
    rows = list(read_rows(part_of(path), ["text"], max_cell_bytes=1000))
    (lost,) = [row for row in rows if not isinstance(row[1], dict)]
    assert lost[0] == first.num_records
    assert f"{second.num_records} of one block" in lost[1].detail
    assert len(rows) - 1 == 60 - second.num_records
    assert rows[-1] == (59, {"text": RECORDS[59]["text"]})


def test_records_that_a_block_does_not_count_are_lost_aloud(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    data = bytearray(write(path, SCHEMA, RECORDS[:5], block_bytes=10_000))
    (block,) = fastavro.block_reader(io.BytesIO(data))
    assert data[block.offset] == 2 * 5
    data[block.offset] = 2 * 3
    path.write_bytes(data)
    *rows, (_, lost) = read_rows(part_of(path), ["text"], max_cell_bytes=1000)
    assert [row["text"] for _, row in rows] == [record["text"] for record in RECORDS[:3]]
    assert lost.reason == Reason.UNREADABLE_INPUT


@pytest.mark.parametrize("schema", ["string", {"type": "array", "items": "string"}])
def test_a_foreign_schema_is_refused_by_name(tmp_path: Path, schema: Any) -> None:
    write(tmp_path / "a.avro", schema, ["one"] if schema == "string" else [["one"]])
    with pytest.raises(InputError, match='has no column "text"'):
        part_of(tmp_path / "a.avro")
    write(tmp_path / "b.avro", {**SCHEMA, "fields": SCHEMA["fields"][:1]}, RECORDS)
    with pytest.raises(InputError, match='has no column "text", it has "id"'):
        part_of(tmp_path / "b.avro")


def test_bytes_are_text_if_they_are_utf8(tmp_path: Path) -> None:
    write(tmp_path / "a.avro", with_text("bytes"), [{"text": "∑".encode()}, {"text": b"\xff"}])
    first, second = read_part(part_of(tmp_path / "a.avro"), ReadingRules())
    assert first.text.decode() == "∑"
    assert second.reason == Reason.INVALID_UNICODE


def test_a_string_that_is_not_utf8_costs_its_document(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    data = write(path, with_text("string"), [{"text": "one"}, {"text": "bad"}, {"text": "two"}])
    path.write_bytes(data.replace(b"bad", b"b\xffd"))
    assert [getattr(o, "reason", None) for o in read_part(part_of(path), ReadingRules())] == [
        *(None, Reason.INVALID_UNICODE, None)
    ]


def test_ids_of_other_types_are_text(tmp_path: Path) -> None:
    """A hash as hexadecimal, times, decimals and UUIDs as parquet's."""
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 600, datetime.UTC)
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}
    cases: list[tuple[Any, Any, str]] = [
        ({"type": "fixed", "name": "Hash", "size": 3}, b"\x00\xffa", "00ff61"),
        ({"type": "string", "logicalType": "uuid"}, UUID(int=7), str(UUID(int=7))),
        ({"type": "int", "logicalType": "date"}, moment.date(), "2026-01-02"),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            moment,
            "2026-01-02 03:04:05.000600Z",
        ),
        (decimal, Decimal("1.50"), "1.50"),
        ("long", 7, "7"),
        ({"type": "enum", "name": "Kind", "symbols": ["WEB", "BOOK"]}, "BOOK", "BOOK"),
    ]
    for kind, value, expected in cases:
        fields = [{"name": "id", "type": ["null", kind]}, {"name": "text", "type": "string"}]
        schema = {"type": "record", "name": "Page", "fields": fields}
        write(tmp_path / "a.avro", schema, [{"id": value, "text": "one"}])
        (document,) = read_part(part_of(tmp_path / "a.avro"), ReadingRules())
        assert document.document_id == expected


def test_a_codec_that_is_not_installed_is_named(tmp_path: Path) -> None:
    data = write(tmp_path / "a.avro", SCHEMA, RECORDS[:3], codec="deflate")
    (tmp_path / "a.avro").write_bytes(data.replace(b"\x0edeflate", b"\x0csnappy"))
    try:
        import cramjam  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match="need to install"):
            part_of(tmp_path / "a.avro")


def test_every_format_is_named_wherever_formats_are() -> None:
    suffixes = [suffix for each in FORMATS.values() for suffix in each.suffixes]
    assert ".avro" in suffixes
    for suffix in suffixes:
        assert suffix in name_suffixes()
        assert suffix in describe_formats()
    assert len(suffixes) == len(set(suffixes))
