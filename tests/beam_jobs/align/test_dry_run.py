"""What a job would do, told beforehand and compared with what it does."""

import bz2
import gzip
import io
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from beam_jobs.align.__main__ import main
from beam_jobs.align.dry_run import estimate_volume
from beam_jobs.align.inputs import sampling
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import PlacedDocument, ReadingRules
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.sampling import cut_files, sample_input  # type: ignore[attr-defined]
from beam_jobs.align.opened_input import open_input
from pipeline.dataset.dataset_reading import read_manifest
from tests.support.corpus import (
    align_options,
    command_line,
    json_line,
    reference_dataset,
    small_corpus,
)


def shown(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main([*arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_tells_what_the_job_then_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, reference = reference_dataset()
    output = tmp_path / "out"
    said = shown(capsys, command_line(align_options(corpus, output)))
    assert not output.exists()
    assert "  input           9 files (2 jsonl, 2 jsonl gzip, 2 text, 1 jsonl zstd, " in said
    totals = read_manifest(str(reference)).totals
    found = re.search(r"teacher .*; ([\d.]+) tokens a student token", said)
    assert found
    ratio = totals["num_teacher_tokens"] / totals["num_student_tokens"]
    assert float(found[1]) == pytest.approx(ratio, rel=0.05)
    found = re.search(r"([\d.]+) bytes a student token", said)
    assert found
    per_token = totals["num_bytes"] / totals["num_student_tokens"]
    assert float(found[1]) == pytest.approx(per_token, rel=0.1)
    num_shards = len(read_manifest(str(reference)).shards)
    found = re.search(r"dataset +about [\d.]+ MB in (\d+) shards, ", said)
    assert found
    assert int(found[1]) == pytest.approx(num_shards, rel=0.5)
    for pattern in (
        r"disk +about [\d.]+ MB while it runs; .* are free at ",
        r"memory +about [\d.]+ [MG]B a process, 1 of them, and .+ more for a document as long",
        r"time +about .* of aligning here \([\d.e-]+ core hours\), besides",
        r"dead letters +\d+ of \d+ sampled documents",
        "    a.jsonl line .* bad_json: ",
        "student         fast path; about ",
    ):
        assert re.search(pattern, said), pattern
    slow = [*command_line(align_options(corpus, output)), "--no-fast-path"]
    assert "student         reference path (" in shown(capsys, slow)


def test_a_dry_run_of_a_dataset_foretells_its_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, reference = reference_dataset()
    said = shown(capsys, [f"--input={reference}", f"--output={tmp_path / 'again'}"])
    found = re.search(r"dataset +about [\d.]+ MB in (\d+) shards, ", said)
    assert found
    made = read_manifest(str(reference))
    texts = 3 * made.totals["num_text_bytes"] / made.configuration["shard_bytes"]
    assert int(found[1]) == made.configuration["num_buckets"] != math.ceil(texts)


def test_documents_that_take_the_reference_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["plain", "a <0x0A> b", "the name of a byte: <0x41>"]
    lines = (json.dumps({"id": f"d{n}", "text": text}) for n, text in enumerate(texts))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus, _ = reference_dataset()
    options = align_options(corpus, tmp_path / "out", input=(str(tmp_path / "a.jsonl"),))
    said = shown(capsys, command_line(options))
    assert "student         fast path, 2 of the documents by the reference; about " in said
    assert "teacher         fast path; about " in said


def test_a_dry_run_refuses_what_the_job_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    corpus, reference = reference_dataset()
    arguments = command_line(align_options(corpus, reference))
    assert main([*arguments, "--dry-run", "--name=other"]) == 2
    assert "holds a dataset with a different configuration" in capsys.readouterr().err
    assert main([*arguments, "--dry-run", "--id-field=ulr"]) == 2


def make_records(number: int) -> list[dict[str, Any]]:
    """Records whose text is a small part, of lengths that differ much."""
    choose = random.Random(3)
    words = ["the", "law", "of", "large", "numbers", "π", "is", "old", "数学", "\n"]
    return [
        {
            "id": f"document-{n}",
            "text": " ".join(choose.choices(words, k=choose.choice([1, 2, 5, 40, 200]))),
            "notes": " ".join(choose.choices(words, k=90)),
        }
        for n in range(number)
    ]


def json_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def csv_rows(records: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    write_csv(pa.Table.from_pylist(records), file)
    return file.getvalue()


def parquet(records: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), file, row_group_size=1000)
    return file.getvalue()


def arrow(records: list[dict[str, Any]]) -> bytes:
    file, table = io.BytesIO(), pa.Table.from_pylist(records)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    return file.getvalue()


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ESTIMATE", sampling.SampleSize(24, 500, 4 << 20))
    monkeypatch.setattr(sampling, "MEASURED_BYTES", 300_000)
    monkeypatch.setattr("beam_jobs.align.inputs.table_format._COUNTED_BYTES", 200_000)


def estimate(pattern: str) -> tuple[float, float, int]:
    """Return the estimated documents and bytes of text, and how many documents were sampled."""
    sample = sample_input(find_inputs([pattern]), ReadingRules(), sampling.ESTIMATE)
    scales = [part.measure_scale() for part in sample]
    pairs = list(zip(sample, scales, strict=True))
    documents = sum(len(part.documents) * scale for part, scale in pairs)
    text = sum(len(d.text) * scale for part, scale in pairs for d in part.documents)
    return documents, text, sum(len(part.outcomes) for part in sample)


def count(pattern: str) -> tuple[int, int]:
    """Return what there is, read from start to end."""
    parts = [part for part, _ in cut_files(find_inputs([pattern]))]
    outcomes = [outcome for part in parts for outcome in read_part(part, ReadingRules())]
    documents = [outcome for outcome in outcomes if isinstance(outcome, PlacedDocument)]
    return len(documents), sum(len(document.text) for document in documents)


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("a.jsonl", json_lines),
        ("a.jsonl.gz", lambda records: gzip.compress(json_lines(records))),
        ("a.jsonl.bz2", lambda records: bz2.compress(json_lines(records))),
        ("a.json", lambda records: json.dumps(records, indent=1).encode()),
        ("a.csv", csv_rows),
        ("a.parquet", parquet),
        ("a.arrow", arrow),
    ],
)
@pytest.mark.usefixtures("small_sample")
def test_text_is_estimated_within_15_percent(
    tmp_path: Path, name: str, encode: Callable[[list[dict[str, Any]]], bytes]
) -> None:
    (tmp_path / name).write_bytes(encode(make_records(6000)))
    documents, text, sampled = estimate(f"{tmp_path}/*")
    assert sampled < 1000
    assert (documents, text) == pytest.approx(count(f"{tmp_path}/*"), rel=0.15)


@pytest.mark.usefixtures("small_sample")
def test_many_files_of_all_kinds_are_sampled_by_size(tmp_path: Path) -> None:
    records = make_records(8000)
    for part in range(60):
        own = records[part * 10 : part * 10 + 10 + 40 * (part % 5)]
        (tmp_path / f"{part}.jsonl").write_bytes(json_lines(own))
        (tmp_path / f"{part}.txt").write_text(own[0]["notes"] * (part + 1), "utf-8")
    (tmp_path / "z.parquet").write_bytes(parquet(records))
    documents, text, sampled = estimate(f"{tmp_path}/*")
    assert sampled < 1000
    assert text == pytest.approx(count(f"{tmp_path}/*")[1], rel=0.15)
    assert documents > 0


@pytest.mark.usefixtures("small_sample")
def test_text_files_are_a_document_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = small_corpus(tmp_path)
    for part in range(60):
        text = "a few words " * (1 + 50 * part)
        Path(corpus.folder, "in", f"{part}.txt").write_text(text, "utf-8")
    options = align_options(corpus, tmp_path / "out", student="bytes", teacher="bytes")
    said = shown(capsys, command_line(options))
    assert " of text in 60 documents\n  sample          24 documents of " in said


def test_a_small_input_is_read_whole(tmp_path: Path) -> None:
    records = make_records(30)
    (tmp_path / "a.jsonl").write_bytes(json_lines(records) + b"{\n")
    assert estimate(f"{tmp_path}/*")[:2] == count(f"{tmp_path}/*")


def test_a_document_above_the_sample_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is aligned, and represents the rest."""
    corpus, _ = reference_dataset()
    monkeypatch.setattr("beam_jobs.align.dry_run.MEASURED_BYTES", 4000)
    monkeypatch.setattr(sampling, "ESTIMATE", sampling.SampleSize(24, 2000, 1000))
    text = "The quick brown fox jumps over the lazy dog, twice. " * 1000
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(json_lines([{"id": "a", "text": text}]))
    options = align_options(corpus, tmp_path / "out", input=(f"{tmp_path}/in/*",))
    said = shown(capsys, command_line(options))
    found = re.search(r"student .*; about ([\d.]+) k tokens", said)
    assert found
    opened = open_input(options)
    sample = sample_input(opened.files, opened.rules, sampling.ESTIMATE)
    on_their_way = estimate_volume(sample, opened)[0].num_block_bytes
    assert on_their_way == pytest.approx(len(text), rel=0.05)
    assert main(command_line(options)) == 0
    totals = read_manifest(str(tmp_path / "out")).totals
    assert float(found[1]) * 1000 == pytest.approx(totals["num_student_tokens"], rel=0.05)
    assert "about 52.0 kB of text in 1 document\n" in said


def test_nothing_usable_is_said_and_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, _ = reference_dataset()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(b"{\n" * 4)
    options = align_options(corpus, tmp_path / "out", input=(f"{tmp_path}/in/*",))
    assert main([*command_line(options), "--dry-run"]) == 3
    error = capsys.readouterr().err
    assert "can't estimate tokens, disk, memory or time" in error
    assert "\n  dead letters    " in error, "lines of their own, not \\n"
    assert "bad_json" in error


def test_a_dry_run_ends_as_the_job_would_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for files that a sample of places by size would pass over."""
    monkeypatch.setattr(sampling, "ESTIMATE", sampling.SampleSize(1, 2000, 4 << 20))
    corpus = small_corpus(tmp_path / "corpus", a=[json_line(n, f"text {n}") for n in range(200)])
    inputs = Path(corpus.folder, "in")
    given = command_line(
        align_options(
            corpus, tmp_path / "out", student="bytes", teacher="bytes", max_dead_letters=0.01
        )
    )
    assert shown(capsys, given)
    for name, status, said in (
        ("b.parquet", 3, "unusable        b.parquet: not one document can be used: unreadable_"),
        ("c.txt", 0, "not looked at   1 text file, a document each"),
    ):
        (inputs / name).write_bytes(b"")
        assert main([*given, "--dry-run"]) == status
        (inputs / name).unlink()
        assert said in capsys.readouterr().out
    (inputs / "a.jsonl").write_bytes((inputs / "a.jsonl").read_bytes() + b"{\n" * 20)
    assert main([*given, "--dry-run"]) == 3
    error = capsys.readouterr().err
    assert "9.09 % of the sampled documents are left out, more than --max-dead-letters 1 %" in error
    assert main([*given, "--dry-run", "--max-dead-letters=1"]) == 0


def test_a_disk_that_is_too_small_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, _ = reference_dataset()
    arguments = command_line(align_options(corpus, tmp_path / "out"))
    monkeypatch.setattr("beam_jobs.shortages.free_bytes", lambda folder: 1000)
    assert "1.00 kB are free at" in (said := shown(capsys, arguments))
    assert "; WARNING: that is too little" in said
