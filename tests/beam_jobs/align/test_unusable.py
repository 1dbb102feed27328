"""A file of which nothing can be used: named, and a failure of its own, whatever its share."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_jobs.align.__main__ import main
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import ReadingRules
from beam_jobs.align.inputs.fields import describe_others
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.parts import cut_files
from beam_jobs.align.inputs.unusable import letters_of_files, note_unusable
from pipeline.dataset.dataset_reading import read_manifest
from tests.support.corpus import align_options, command_line, json_line, small_corpus

LINES = [json_line(f"d{n}", f"text {n}") for n in range(400)]
DOCUMENTS = [{"id": f"more {n}", "text": "x"} for n in range(5)]
FILES: dict[str, tuple[str, bytes, str]] = {
    "error page": ("b.jsonl", b"<!DOCTYPE html>\n<html>403</html>\n", "bad_json 2 (line 1: "),
    "other field": (
        "b.jsonl",
        b"".join(json_line(n, "x" * 9).replace(b'"text"', b'"content"') for n in range(3)),
        'missing_text 3 (line 1: no "text" in the record, which has "id" and "content": '
        "--text-field content has the longest string)",
    ),
    "wrapped": (
        "b.json",
        json.dumps({"n": 1, "data": DOCUMENTS}).encode(),
        "\"data\" is a list of 5 objects, of which jq -c '.data[]' makes lines)",
    ),
    "by key": (
        "b.json",
        json.dumps({d["id"]: d for d in DOCUMENTS}).encode(),
        "each is an object, of which jq -c '.[]' makes lines)",
    ),
    "pretty": ("b.jsonl", json.dumps(DOCUMENTS[0], indent=1).encode(), "bad_json 4 (line 1: "),
    "no value": ("b.csv", b"id,text\na,\nb,\n", "empty_text 2 (#0: "),
}


def parquet_of_nulls() -> bytes:
    file = pa.BufferOutputStream()
    table = pa.table({"id": ["a"] * 9, "text": pa.nulls(9, pa.string())})
    pq.write_table(table, file, row_group_size=2)
    return bytes(file.getvalue())


FILES["nulls"] = ("b.parquet", parquet_of_nulls(), 'missing_text 9 (#0: no "text" in the record)')


@pytest.mark.parametrize("kind", FILES)
def test_a_file_without_a_usable_document_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=LINES)
    name, data, why = FILES[kind]
    (tmp_path / "corpus" / "in" / name).write_bytes(data)
    command = command_line(align_options(corpus, tmp_path / "out", max_dead_letters=0.1))
    for more in (["--dry-run"], [], []):  # the same command, run again, says so again
        assert main([*command, *more]) == 3
        captured = capsys.readouterr()
        assert f"{name}: not one document can be used: " in captured.out + captured.err
        assert why in captured.out + captured.err
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest.totals["num_documents"] == 400
    assert manifest.dead_letters.by_reason["nothing_usable"] == 1
    (letter,) = (
        each
        for each in map(json.loads, (tmp_path / "out/dead_letters.jsonl").read_text().splitlines())
        if each["reason"] == "nothing_usable"
    )
    assert (letter["source"], letter["document_id"]) == (name, None)
    assert main([*command, "--max-dead-letters=1"]) == 0, "an option allows it"


def test_one_document_makes_a_file_usable_wherever_it_is(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=LINES, b=[b"bad\n", json_line("x", "x"), b"bad\n"])
    for name, text in (("c.txt", ""), ("d.jsonl", "\n\n")):  # one document, and none
        (tmp_path / "corpus" / "in" / name).write_text(text)
    command = command_line(align_options(corpus, tmp_path / "out", max_dead_letters=0.01))
    assert main([*command, "--dry-run"]) == 0
    assert main(command) == 0
    assert read_manifest(str(tmp_path / "out")).dead_letters.by_reason == {
        "bad_json": 2,
        "empty_text": 1,
    }


def test_documents_that_the_dataset_has_already_are_usable(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "corpus", a=LINES)
    assert main(command_line(align_options(corpus, tmp_path / "out"))) == 0
    more = small_corpus(tmp_path / "more", b=LINES[:4], c=[json_line("new", "x")])
    append = command_line(align_options(more, tmp_path / "out", max_dead_letters=0.01))
    assert main([*append, "--append"]) == 0


@pytest.mark.parametrize("good", [None, 0, 7, 19])
@pytest.mark.parametrize("write", ["jsonl", "parquet"])
def test_parts_of_a_file_know_together_whether_one_is_usable(
    tmp_path: Path, good: int | None, write: str
) -> None:
    records = [{"id": f"d{n}", "text": "x" if n == good else None} for n in range(20)]
    path = tmp_path / f"a.{write}"
    if write == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
    parts = [part for part, _ in cut_files(find_inputs([str(path)]), task_bytes=70)]
    assert len(parts) > 3
    (tmp_path / "run").mkdir()
    letters = []
    for part in parts:
        outcomes = note_unusable(read_part(part, ReadingRules()), part, str(tmp_path / "run"))
        letters += [
            {"source": o.source, "position": o.position, "line": None, "reason": "x", "detail": "y"}
            for o in outcomes
        ]
    found = letters_of_files(letters, str(tmp_path / "run"))
    assert [each["source"] for each in found] == ([] if good is not None else [path.name])


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"text": None}, ""),
        ({}, ", which has no field"),
        ({"n": 1}, ', which has "n"'),
        ({"m": {"a b": "long", "c": "x"}}, ", which has \"m\": --text-field 'm.a b' has the"),
        ({f"k{n}": 1 for n in range(12)}, '"k7" and 4 more'),
        ({"x" * 99: 1}, f'"{"x" * 40}…"'),
        ({"\x1b[2J": 1}, r'"\x1b[2J"'),
        ({"a b": [{}]}, """jq -c '.["a b"][]' makes lines"""),
        ({"id": 1, "chat": [{"role": "user", "content": "x"}]}, '"chat" is a conversation: --mess'),
        ({"c": [{"from": "human", "value": "x"}]}, 'jq -c \'{messages: [.c[] | {role: ({"human"'),
    ],
)
def test_what_a_record_has_instead(record: dict[str, object], told: str) -> None:
    described: Callable[..., str] = describe_others
    assert (told in described(record, "text")) if told else described(record, "text") == ""
