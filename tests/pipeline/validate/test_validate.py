"""Validation finds each kind of damage, names it exactly, and finds nothing where nothing is."""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from pipeline.validate.arrays import find_foreign_content, find_unsound_offsets, stack_documents
from pipeline.validate.command import main
from pipeline.validate.dataset import ValidationReport, validate_dataset
from pipeline.validate.findings import SHARD_CHECKS
from schemas.document import AlignedDocument, decode_document, encode_document
from schemas.index import ShardIndex, decode_index, encode_index
from schemas.manifest import MANIFEST_FILE, Manifest, decode_manifest, encode_manifest
from tests.support.datasets import (
    build_dataset,
    byte_level,
    make_texts,
    store_tokenizer,
    word_pieces,
)
from tests.support.tokenizer_zoo import load

TAR = "docs-000001-of-000003.tar"
INDEX = "docs-000001-of-000003.index.parquet"
OTHER = "docs-000002-of-000003.tar"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    build_dataset(folder)
    return folder


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dataset"))


def read_manifest(folder: Path) -> Manifest:
    return decode_manifest((folder / MANIFEST_FILE).read_bytes())


def read_index(folder: Path, name: str = INDEX) -> ShardIndex:
    return decode_index((folder / name).read_bytes())


def edit_bytes(path: Path, position: int, change: Callable[[int], int]) -> None:
    data = bytearray(path.read_bytes())
    data[position] = change(data[position])
    path.write_bytes(data)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest's JSON, leaving totals and fingerprint as they were."""
    body = json.loads((folder / MANIFEST_FILE).read_bytes())
    change(body)
    (folder / MANIFEST_FILE).write_text(json.dumps(body), "utf-8")


def record_hashes(folder: Path) -> None:
    """Make the manifest name the shard's files as they are now: a liar that hashes its lies."""
    manifest = read_manifest(folder)
    shards = list(manifest.shards)
    tar, index = (folder / TAR).read_bytes(), (folder / INDEX).read_bytes()
    shards[1] = replace(
        shards[1],
        num_bytes=len(tar),
        sha256=sha256(tar).hexdigest(),
        index_num_bytes=len(index),
        index_sha256=sha256(index).hexdigest(),
    )
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, shards=tuple(shards))))


def edit_index(folder: Path, **columns: Any) -> None:
    index = replace(read_index(folder), **columns)
    (folder / INDEX).write_bytes(encode_index(index))
    record_hashes(folder)


def edit_sample(
    folder: Path, row: int, change: Callable[[AlignedDocument], AlignedDocument]
) -> None:
    """Replace a payload by another of the same size, with the index's CRC-32 made to fit."""
    index = read_index(folder)
    start, size = int(index.payload_offset[row]), int(index.payload_bytes[row])
    data = bytearray((folder / TAR).read_bytes())
    payload = encode_document(change(decode_document(bytes(data[start : start + size]))))
    assert len(payload) == size
    data[start : start + size] = payload
    (folder / TAR).write_bytes(data)
    crc32 = index.crc32.copy()
    crc32[row] = zlib.crc32(payload)
    edit_index(folder, crc32=crc32)


def places(report: ValidationReport) -> list[tuple[str, str, str]]:
    return [(finding.check, finding.shard, finding.key) for finding in report.findings]


def message(report: ValidationReport, check: str) -> str:
    return next(finding.message for finding in report.findings if finding.check == check)


# What a sound dataset gives.


def test_a_sound_dataset_has_no_findings(pristine: Path) -> None:
    report = validate_dataset(str(pristine), with_tokenizers=True)
    assert report.findings == ()
    assert report.notes == ()
    assert report.fingerprint == read_manifest(pristine).fingerprint
    assert report.totals["num_documents"] == 24


@pytest.mark.parametrize("keep_text", [True, False])
def test_tokens_that_do_not_tile_are_sound(tmp_path: Path, keep_text: bool) -> None:
    build_dataset(tmp_path, teacher=word_pieces(), keep_text=keep_text)
    assert validate_dataset(str(tmp_path), with_tokenizers=keep_text).findings == ()


def test_empty_shards_and_several_windows_are_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.validate.tar.WINDOW_BYTES", 4096)
    build_dataset(tmp_path, make_texts(9), num_shards=20)
    assert validate_dataset(str(tmp_path)).findings == ()


def test_processes_find_the_same(dataset: Path) -> None:
    edit_bytes(dataset / TAR, 1000, lambda byte: byte ^ 1)
    alone = validate_dataset(str(dataset))
    steps: list[int] = []
    together = validate_dataset(str(dataset), num_processes=2, advance=steps.append)
    assert alone.findings
    assert together.findings == alone.findings
    assert sum(steps) == alone.totals["num_bytes"]


def test_a_store_other_than_a_disk(pristine: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(pristine), "/validated", recursive=True)
    report = validate_dataset("memory://validated/manifest.json", with_tokenizers=True)
    assert report.findings == ()
    memory.pipe(f"/validated/{TAR}", memory.cat(f"/validated/{TAR}")[:-512])
    assert {"files", "sha256", "tar"} == {f[0] for f in places(validate_dataset(report.dataset))}


# Damaged files.


def test_header_byte_flipped(dataset: Path) -> None:
    index = read_index(dataset)
    edit_bytes(dataset / TAR, int(index.payload_offset[1]) - 512 + 3, lambda byte: byte ^ 1)
    report = validate_dataset(str(dataset))
    assert places(report) == [("sha256", TAR, ""), ("tar", TAR, index.key[1])]
    assert "is damaged (bad checksum)" in message(report, "tar")


def test_payload_byte_flipped(dataset: Path) -> None:
    index = read_index(dataset)
    edit_bytes(dataset / TAR, int(index.payload_offset[2]) + 400, lambda byte: byte ^ 1)
    report = validate_dataset(str(dataset))
    assert places(report) == [("crc32", TAR, index.key[2]), ("sha256", TAR, "")]
    assert f"the index says {index.crc32[2]:08x}" in message(report, "crc32")


def test_padding_byte_flipped(dataset: Path) -> None:
    index = read_index(dataset)
    end = int(index.payload_offset[0] + index.payload_bytes[0])
    assert end % 512
    edit_bytes(dataset / TAR, end, lambda _: 1)
    assert places(validate_dataset(str(dataset))) == [
        ("sha256", TAR, ""),
        ("tar", TAR, index.key[0]),
    ]


def test_truncated_at_a_member_boundary(dataset: Path) -> None:
    index = read_index(dataset)
    start = int(index.payload_offset[3]) - 512
    (dataset / TAR).write_bytes((dataset / TAR).read_bytes()[:start])
    report = validate_dataset(str(dataset))
    assert places(report) == [("files", TAR, ""), ("sha256", TAR, ""), ("tar", TAR, index.key[3])]
    missing = len(index) - 4
    assert message(report, "tar").endswith(f"the {missing} after it are cut off or missing")


def test_truncated_inside_a_member(dataset: Path) -> None:
    index = read_index(dataset)
    cut = int(index.payload_offset[3]) + 100
    (dataset / TAR).write_bytes((dataset / TAR).read_bytes()[:cut])
    report = validate_dataset(str(dataset))
    assert places(report) == [("files", TAR, ""), ("sha256", TAR, ""), ("tar", TAR, index.key[3])]
    assert f"tar ends at byte {cut}" in message(report, "tar")


def test_end_of_tar_cut_off(dataset: Path) -> None:
    (dataset / TAR).write_bytes((dataset / TAR).read_bytes()[:-700])
    report = validate_dataset(str(dataset))
    assert places(report) == [("files", TAR, ""), ("sha256", TAR, ""), ("tar", TAR, "")]
    assert "324 bytes after the last member" in message(report, "tar")


def test_something_extra_after_the_end(dataset: Path) -> None:
    with (dataset / TAR).open("ab") as file:
        file.write(b"extra" * 200)
    report = validate_dataset(str(dataset))
    assert places(report) == [("files", TAR, ""), ("sha256", TAR, ""), ("tar", TAR, "")]
    assert "bytes other than zero follow" in message(report, "tar")


def test_shards_swapped(dataset: Path) -> None:
    data = (dataset / TAR).read_bytes()
    (dataset / TAR).write_bytes((dataset / OTHER).read_bytes())
    (dataset / OTHER).write_bytes(data)
    report = validate_dataset(str(dataset))
    checks = {(check, shard) for check, shard, _ in places(report)}
    assert checks >= {("sha256", TAR), ("sha256", OTHER), ("tar", TAR), ("tar", OTHER)}
    assert {check for check, _ in checks} == {"files", "sha256", "tar"}


def test_files_deleted(dataset: Path) -> None:
    (dataset / TAR).unlink()
    (dataset / "docs-000002-of-000003.index.parquet").unlink()
    (dataset / "dead_letters.jsonl").unlink()
    report = validate_dataset(str(dataset))
    assert places(report) == [("files", "", ""), ("files", TAR, ""), ("files", OTHER, "")]
    assert all("there is no such file" in finding.message for finding in report.findings)


def test_index_damaged(dataset: Path) -> None:
    data = (dataset / INDEX).read_bytes()
    (dataset / INDEX).write_bytes(data[: len(data) // 2])
    report = validate_dataset(str(dataset))
    assert places(report) == [("files", TAR, ""), ("index", TAR, ""), ("sha256", TAR, "")]


# Entries that contradict each other, with every hash and CRC made to fit.


def test_duplicate_entry_in_an_index(dataset: Path) -> None:
    index = read_index(dataset)
    rows = np.array([0, 1, 1, *range(2, len(index))])
    cuts = np.diff(index.cut_starts)[rows]
    own = [np.arange(*index.cut_starts[row : row + 2]) for row in rows]
    edit_index(
        dataset,
        key=[index.key[row] for row in rows],
        document_id=[index.document_id[row] for row in rows],
        cut_starts=np.concatenate([[0], np.cumsum(cuts)]),
        cut_student=index.cut_student[np.concatenate(own)],
        cut_teacher=index.cut_teacher[np.concatenate(own)],
        **{
            name: getattr(index, name)[rows]
            for name in ("payload_offset", "payload_bytes", "crc32", "num_text_bytes")
        },
        num_student_tokens=index.num_student_tokens[rows],
        num_teacher_tokens=index.num_teacher_tokens[rows],
        num_mapped=index.num_mapped[rows],
        byte_iou_sum=index.byte_iou_sum[rows],
    )
    report = validate_dataset(str(dataset))
    assert places(report) == [
        ("counts", TAR, ""),
        ("counts", TAR, ""),
        ("counts", TAR, ""),
        ("counts", TAR, ""),
        ("duplicate_keys", TAR, index.key[1]),
        ("index", TAR, index.key[1]),
    ]
    assert message(report, "index").startswith("payload_offset of row 2 is")


def test_shard_listed_twice(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    shards = (*manifest.shards, manifest.shards[1])
    (dataset / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, shards=shards)))
    report = validate_dataset(str(dataset))
    keys = read_index(dataset).key
    expected = [("duplicate_keys", TAR, key) for key in keys]
    assert places(report) == [*expected, ("manifest", "", "")]
    assert message(report, "duplicate_keys") == f"the key is already in {TAR}"
    assert message(report, "manifest") == f"shard {TAR} is listed 2 times"


def test_altered_span(dataset: Path) -> None:
    def widen(document: AlignedDocument) -> AlignedDocument:
        spans = document.teacher_spans.copy()
        spans[5, 1] += 1
        return replace(document, teacher_spans=spans)

    edit_sample(dataset, 0, widen)
    report = validate_dataset(str(dataset))
    assert places(report) == [("spans", TAR, read_index(dataset).key[0])]
    assert message(report, "spans").startswith("student token 5 has ")


def test_altered_token(dataset: Path) -> None:
    def change(document: AlignedDocument) -> AlignedDocument:
        input_ids = document.teacher.input_ids.copy()
        input_ids[[2, 4]] = [480, 65535]
        return replace(document, teacher=replace(document.teacher, input_ids=input_ids))

    edit_sample(dataset, 1, change)
    report = validate_dataset(str(dataset))
    assert places(report) == [("input_ids", TAR, read_index(dataset).key[1])]
    expected = "teacher token 2 has id 480, the vocabulary 480 (first of 2)"
    assert message(report, "input_ids") == expected


def test_altered_token_is_found_by_its_text(dataset: Path) -> None:
    def change(document: AlignedDocument) -> AlignedDocument:
        input_ids = document.student.input_ids.copy()
        input_ids[3] += 1
        return replace(document, student=replace(document.student, input_ids=input_ids))

    edit_sample(dataset, 1, change)
    assert places(validate_dataset(str(dataset))) == []
    report = validate_dataset(str(dataset), with_tokenizers=True)
    assert places(report) == [("tokenization", TAR, read_index(dataset).key[1])]
    assert message(report, "tokenization").startswith("student token 3 is id ")


def test_text_and_its_hash(dataset: Path) -> None:
    edit_sample(dataset, 0, lambda document: replace(document, text_sha256="0" * 64))
    report = validate_dataset(str(dataset))
    assert places(report) == [("text", TAR, read_index(dataset).key[0])]
    assert message(report, "text").endswith("the sample says 0000000000000000…")


def test_lengths_that_do_not_cover_the_text(dataset: Path) -> None:
    def shrink(document: AlignedDocument) -> AlignedDocument:
        offsets = document.student.byte_offsets.copy()
        offsets[-1, 1] -= 1
        student = replace(document.student, byte_offsets=offsets)
        return replace(document, student=student, text=None)

    index = read_index(dataset)
    start, size = int(index.payload_offset[0]), int(index.payload_bytes[0])
    whole = decode_document((dataset / TAR).read_bytes()[start : start + size])
    shorter = shrink(whole)
    must_tile = np.ones(1, np.bool_)
    sound, short = stack_documents([whole]), stack_documents([shorter])
    assert find_unsound_offsets(sound.student, sound.num_text_bytes, must_tile) == []
    size = whole.num_text_bytes
    assert find_unsound_offsets(short.student, short.num_text_bytes, must_tile) == [
        (0, f"tokens cover {size - 1} of {size} bytes of text")
    ]


def test_altered_cut_point(dataset: Path) -> None:
    index = read_index(dataset)
    cut_teacher = index.cut_teacher.copy()
    cut_teacher[0] += 1
    edit_index(dataset, cut_teacher=cut_teacher)
    report = validate_dataset(str(dataset))
    row = int(np.searchsorted(index.cut_starts, 0, side="right")) - 1
    assert places(report) == [("cut_points", TAR, index.key[row])]


def test_altered_counts_in_the_index(dataset: Path) -> None:
    index = read_index(dataset)
    num_teacher_tokens = index.num_teacher_tokens.copy()
    num_teacher_tokens[4] += 1
    edit_index(dataset, num_teacher_tokens=num_teacher_tokens)
    report = validate_dataset(str(dataset))
    assert places(report) == [("counts", TAR, ""), ("counts", TAR, index.key[4])]


def test_renamed_document(dataset: Path) -> None:
    index = read_index(dataset)
    names = list(index.document_id)
    names[0] = "doc-0-X"
    edit_index(dataset, document_id=names)
    report = validate_dataset(str(dataset))
    assert places(report) == [("key", TAR, index.key[0])]
    assert message(report, "key").endswith('the index says "doc-0-X"')


def test_document_under_a_foreign_key(dataset: Path) -> None:
    index = read_index(dataset)
    other = "doc-0-" + "z" * (len(index.document_id[0]) - 6)
    edit_sample(dataset, 0, lambda document: replace(document, document_id=other))
    edit_index(dataset, document_id=[other, *index.document_id[1:]])
    report = validate_dataset(str(dataset))
    assert places(report) == [("key", TAR, index.key[0])]
    assert message(report, "key").startswith(f'document "{other}" has the key ')


# The manifest and the files beside it.


def test_altered_manifest_count(dataset: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["shards"][1]["num_student_tokens"] += 1

    edit_manifest(dataset, change)
    report = validate_dataset(str(dataset))
    assert places(report) == [("counts", TAR, ""), ("manifest", "", "")]
    assert "totals" in message(report, "manifest")


def test_manifest_of_another_shape(dataset: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["shards"][0]["num_documents"] = "8"
        del body["teacher"]["vocab_size"]

    edit_manifest(dataset, change)
    report = validate_dataset(str(dataset))
    assert {check for check, _, _ in places(report)} == {"manifest"}
    messages = [finding.message for finding in report.findings]
    assert any(text.startswith("$.shards[0].num_documents: ") for text in messages)
    assert any("'vocab_size' is a required property" in text for text in messages)
    assert report.notes == ("shards were not checked: the manifest does not say what they are",)


def test_altered_statistics(dataset: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["statistics"]["byte_iou_sum"] *= 1.001
        body["statistics"]["span_width_counts"][1] += 1

    edit_manifest(dataset, change)
    report = validate_dataset(str(dataset))
    assert places(report) == [("statistics", "", "")] * 2


def test_altered_dead_letters(dataset: Path) -> None:
    with (dataset / "dead_letters.jsonl").open("a") as file:
        file.write('{"reason": "too_large"}\nnot json\n')
    report = validate_dataset(str(dataset))
    assert places(report) == [
        ("dead_letters", "", ""),
        ("dead_letters", "", ""),
        ("sha256", "", ""),
    ]
    assert message(report, "dead_letters") == (
        "dead_letters.jsonl holds {'empty_text': 1, 'too_large': 1}, "
        "the manifest says {'empty_text': 1}"
    )


def test_foreign_tokenizer_copy(dataset: Path) -> None:
    store_tokenizer(dataset, "teacher", byte_level(300))
    report = validate_dataset(str(dataset), with_tokenizers=True)
    assert places(report) == [("sha256", "", "")]
    assert message(report, "sha256").startswith("tokenizers/teacher/tokenizer.json has SHA-256")
    assert report.notes[0].startswith("kept text was not tokenized again")


def test_foreign_tokenizer_with_a_manifest_that_agrees(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    teacher = store_tokenizer(dataset, "teacher", byte_level(300))
    teacher = replace(teacher, vocab_size=manifest.teacher.vocab_size)
    (dataset / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, teacher=teacher)))
    assert validate_dataset(str(dataset)).findings == ()
    report = validate_dataset(str(dataset), with_tokenizers=True)
    assert {check for check, _, _ in places(report)} == {"tokenization"}
    assert all(finding.message.startswith("teacher ") for finding in report.findings)
    assert len(report.findings) == 24


# The command.


def test_command_on_a_sound_dataset(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(pristine), "--tokenizers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 shards, 24 documents, ")
    assert lines[-1] == f"clean: {pristine} keeps every rule"


def test_command_with_findings(
    dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.validate.command.SHOWN_PER_CHECK", 2)
    index = read_index(dataset)
    for start in index.payload_offset[:5].tolist():
        edit_bytes(dataset / TAR, start + 1, lambda byte: byte ^ 1)
    assert main([str(dataset)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"crc32: {TAR}: {sorted(index.key[:5])[0]}: payload has CRC-32 ")
    assert lines[2] == f"crc32: {TAR}: 3 more like these (--json lists all)"
    assert lines[-1] == "6 findings: crc32 5, sha256 1"


def test_command_prints_json(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_bytes(dataset / TAR, 512, lambda byte: byte ^ 1)
    assert main([str(dataset), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["clean"] is False
    assert body["findings"] == [asdict(f) for f in validate_dataset(str(dataset)).findings]
    assert body["totals"]["num_shards"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/folder"], "no/such/folder/manifest.json does not exist"),
        (["", "--json"], "DATASET is empty"),
        (["x", "--workers", "-1"], "--workers -1: it must be 0 or more"),
    ],
)
def test_command_that_cannot_run(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"validate: {words}")


def test_quality_in_the_index_is_that_of_the_sample(dataset: Path) -> None:
    index = read_index(dataset)
    wrong = index.num_mapped.copy()
    wrong[1] += 1
    edit_index(dataset, num_mapped=wrong)
    report = validate_dataset(str(dataset))
    assert places(report) == [("counts", TAR, index.key[1])]
    assert f"num_mapped is {wrong[1] - 1}, the index says {wrong[1]}" in message(report, "counts")
    edit_index(dataset, num_mapped=index.num_mapped, byte_iou_sum=index.byte_iou_sum * 1.001)
    assert "byte_iou_sum is" in message(validate_dataset(str(dataset)), "counts")


def test_metadata_that_the_manifest_does_not_name(dataset: Path) -> None:
    index = read_index(dataset)
    scores = pa.chunked_array([pa.array([None] * len(index), pa.float64())])
    edit_index(dataset, metadata={"score": scores})
    assert message(validate_dataset(str(dataset)), "index").endswith(
        "has metadata ['score (double)'], the manifest names []"
    )


def test_command_refuses_another_version(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_manifest(dataset, lambda body: body.update(schema_version=3))
    assert main([str(dataset)]) == 2
    assert "schema version 3" in capsys.readouterr().err


def test_hostile_names_do_not_reach_the_terminal(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = read_index(dataset)
    edit_index(dataset, document_id=["\x1b[2J", *index.document_id[1:]])
    assert main([str(dataset)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J" in out


def test_help_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert [check for check in SHARD_CHECKS if check not in out] == []


def test_offsets_that_a_library_reports_wrongly_are_condemned() -> None:
    """Its report gave a mark that changed places the bytes of the one it changed with."""
    text = "\u0634\u0651\u064e".encode()
    batch = load("nfc").tokenize_batch([text])
    assert find_foreign_content(batch, [text], load("nfc")) == []
    reported = np.array([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]])
    assert len(batch.byte_offsets) == len(reported)
    wrong = replace(batch, byte_offsets=reported)
    ((document, found),) = find_foreign_content(wrong, [text], load("nfc"))
    assert document == 0
    assert re.fullmatch(r"token 3, id \d+, does not stand for bytes .* of the text .*", found)
