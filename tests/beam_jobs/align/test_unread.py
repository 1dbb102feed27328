"""Input that can't be read: a failure of its own, whatever its share."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_jobs.align.__main__ import main
from beam_jobs.align.inputs.documents import Reason, UnusableError
from beam_jobs.align.inputs.parts import InputFile, InputPart
from beam_jobs.align.inputs.tables import read_rows
from pipeline.dataset.dataset_reading import read_manifest
from tests.support.corpus import align_options, command_line, json_line, small_corpus

LINES = [json_line(f"d{n}", f"text {n}") for n in range(400)]


def cut_stream(folder: Path) -> str:
    whole = gzip.compress(b"".join(json_line(f"more {n}", "x") for n in range(4)), mtime=0)
    (folder / "b.jsonl.gz").write_bytes(whole[:-9])
    return (
        f"b.jsonl.gz line 5: the rest of the file can't be read: .* cut after {len(whole) - 9} byt"
    )


def damaged_page(folder: Path) -> str:
    path = folder / "b.parquet"
    table = pa.table({"text": [f"more text {n}" for n in range(30)]})
    pq.write_table(table, path, row_group_size=10, write_page_checksum=True, use_dictionary=False)
    data, column = (
        bytearray(path.read_bytes()),
        pq.ParquetFile(path).metadata.row_group(1).column(0),
    )
    data[column.data_page_offset + 40] ^= 1
    path.write_bytes(data)
    return "b.parquet#10: rows 10 to 19, 10 of row group 1, can't be read"


def empty_table(folder: Path) -> str:
    (folder / "b.parquet").write_bytes(b"")
    return "b.parquet#0: the rest of the file can't be read: Parquet file size is 0 bytes"


@pytest.mark.parametrize("spoil", [cut_stream, damaged_page, empty_table])
def test_an_unread_rest_ends_the_command_with_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], str]
) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=LINES)
    named = spoil(tmp_path / "corpus" / "in")
    command = command_line(align_options(corpus, tmp_path / "out", max_dead_letters=0.01))
    for start in ("aligned", "is finished"):  # the same command, run again, says so again
        assert main(command) == 3
        captured = capsys.readouterr()
        assert start in captured.out
        assert ("  unread " in captured.out) == (start == "aligned")
        assert "vocag align: not all of the input can be read" in captured.err
        assert re.search(named, captured.err)
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest.dead_letters.by_reason == {"unreadable_input": 1}
    assert manifest.totals["num_documents"] >= 400, "the rest is there all the same"
    assert main([*command, "--max-dead-letters=0.99"]) == 3
    assert main([*command, "--max-dead-letters=1"]) == 0


def test_an_unread_rest_is_something_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=LINES)
    assert main(command_line(align_options(corpus, tmp_path / "out"))) == 0
    more = small_corpus(tmp_path / "more")
    whole = gzip.compress(b"".join(LINES[:4]))
    (tmp_path / "more" / "in" / "b.jsonl.gz").write_bytes(whole[:-9])
    append = command_line(align_options(more, tmp_path / "out", max_dead_letters=0.01))
    assert main([*append, "--append"]) == 3
    assert "not all of the input can be read: b.jsonl.gz" in capsys.readouterr().err
    letters = (tmp_path / "out" / "dead_letters-g001.jsonl").read_text().splitlines()
    assert {json.loads(line)["reason"] for line in letters} == {"known_id", "unreadable_input"}


def test_no_altered_byte_of_arrow_is_another_error_than_damage(tmp_path: Path) -> None:
    """Such as MemoryError, of a length, or UnicodeDecodeError, of a column's name."""
    table, path = pa.table({"id": ["a", "b"], "text": ["one", "two"]}), tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    data = path.read_bytes()
    part = InputPart(InputFile(str(path), "a.arrow", len(data), "arrow", "none"))
    num_refused = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        rows = [row for _, row in read_rows(part, ["id", "text"], max_cell_bytes=100)]
        refusals = [row for row in rows if isinstance(row, UnusableError)]
        num_refused += len(refusals)
        assert {row.reason for row in refusals} <= {Reason.UNREADABLE_INPUT, Reason.INVALID_UNICODE}
    assert num_refused > 100
