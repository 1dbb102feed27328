"""Validation finds each kind of damage, names it exactly, and finds nothing where nothing is."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from pipeline.dataset.dataset_reading import read_manifest
from pipeline.dataset.files import Dataset
from pipeline.validate import score_checks
from pipeline.validate.arrays import find_unsound_offsets, stack_documents
from pipeline.validate.command import main
from pipeline.validate.dataset_checks import ValidationReport, validate_dataset
from schemas.document import AlignedDocument, decode_document
from schemas.errors import RESTORE
from schemas.index import ShardIndex, decode_index
from schemas.manifest import MANIFEST_FILE, encode_manifest
from tests.support.datasets import (
    build_dataset,
    byte_level,
    edit_sample,
    make_texts,
    record_shard,
    store_tokenizer,
    word_pieces,
)
from tests.support.killing import require_ended
from tests.support.sample_encoder import encode_document

TAR = "docs-000001-of-000003.tar"
INDEX = "docs-000001-of-000003.index.parquet"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    build_dataset(folder)
    return folder


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dataset"))


def read_index(folder: Path) -> ShardIndex:
    return decode_index((folder / INDEX).read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "status"),
    [
        ("os.kill(os.getppid(), signal.SIGTERM)", 143),
        ("os.kill(os.getppid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getppid(), signal.SIGINT)", 130),
        ("os.killpg(0, signal.SIGINT)", 130),
    ],
)
def test_workers_end_with_the_command(dataset: Path, send: str, status: int) -> None:
    (dataset.parent / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv):\n"
        "    import os, signal, threading\n"
        "    from pipeline.validate import shard\n"
        "    def end(*_, **__):\n"
        f"        {send}\n"
        "        threading.Event().wait()\n"
        "    shard.check_shard = end\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "vocag", "validate", str(dataset), "--workers", "2"],
        env={**os.environ, "PYTHONPATH": f"{dataset.parent}:{os.getcwd()}"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
        start_new_session=True,  # whose processes a terminal's Ctrl-C reaches
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == status
    if status > 0:
        how = {130: "interrupted", 143: "terminated"}[status]
        assert done.stderr == f"vocag validate: {how}\n"
    require_ended(str(dataset.parent))


def edit_index(folder: Path, **columns: Any) -> None:
    record_shard(folder, 1, replace(read_index(folder), **columns))


def edit_document(
    folder: Path, row: int, change: Callable[[AlignedDocument], AlignedDocument]
) -> None:
    edit_sample(folder, 1, row, lambda data: encode_document(change(decode_document(data))))


def places(report: ValidationReport) -> list[tuple[str, str, str]]:
    return [(finding.check, finding.shard, finding.key) for finding in report.findings]


def message(report: ValidationReport, check: str) -> str:
    return next(finding.message for finding in report.findings if finding.check == check)


def test_a_sound_dataset_has_no_findings(pristine: Path) -> None:
    report = validate_dataset(str(pristine), with_tokenizers=True)
    assert report.findings == ()
    assert report.notes == ()
    assert report.fingerprint == read_manifest(str(pristine)).fingerprint
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


def test_a_side_whose_tokens_cover_nothing_is_a_finding(tmp_path: Path) -> None:
    """Aligning it again ended the command."""
    build_dataset(tmp_path, teacher=word_pieces())

    def bare(document: AlignedDocument) -> AlignedDocument:
        offsets = np.zeros_like(document.teacher.byte_offsets)
        return replace(document, teacher=replace(document.teacher, byte_offsets=offsets))

    edit_document(tmp_path, 2, bare)
    report = validate_dataset(str(tmp_path))
    assert "its tokens cover no byte" in message(report, "offsets")


@pytest.mark.slow
def test_processes_find_the_same(dataset: Path) -> None:
    (dataset / TAR).write_bytes(flip((dataset / TAR).read_bytes(), 1000))
    alone = validate_dataset(str(dataset))
    steps: list[int] = []
    together = validate_dataset(
        str(dataset), with_tokenizers=True, num_processes=2, advance=steps.append
    )
    assert alone.findings
    assert (alone.num_tokenized_again, together.num_tokenized_again) == (None, 23)
    assert together.findings == alone.findings
    assert sum(steps) == alone.totals["num_bytes"]


def test_a_store_other_than_a_disk(pristine: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(pristine), "/validated", recursive=True)
    report = validate_dataset("memory://validated/manifest.json", with_tokenizers=True)
    assert report.findings == ()
    memory.pipe(f"/validated/{TAR}", memory.cat(f"/validated/{TAR}")[:-512])
    assert {"files", "sha256", "tar"} == {f[0] for f in places(validate_dataset(report.dataset))}


def start_of(index: ShardIndex, row: int) -> int:
    return int(index.payload_offset[row])


def end_of(index: ShardIndex, row: int) -> int:
    return int(index.payload_offset[row] + index.payload_bytes[row])


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


CUT = ["files", "sha256", "tar"]


@pytest.mark.parametrize(
    ("damage", "checks", "row", "words"),
    [
        # A header's name, then a time that nothing else shows.
        (lambda d, i: flip(d, start_of(i, 1) - 509), ["sha256", "tar"], 1, "(bad checksum)"),
        (lambda d, i: retimed(d, start_of(i, 1) - 512), ["sha256", "tar"], 1, "mode or time"),
        (lambda d, i: flip(d, start_of(i, 2) + 400), ["crc32", "sha256"], 2, "the index says"),
        (lambda d, i: flip(d, end_of(i, 0)), ["sha256", "tar"], 0, "padding after the payload"),
        (lambda d, i: d[: start_of(i, 3) - 512], CUT, 3, "after it are cut off or missing"),
        (lambda d, i: d[: start_of(i, 3) + 100], CUT, 3, "after it are cut off or missing"),
        (lambda d, i: d[:-700], CUT, None, "324 bytes after the last member"),
        (lambda d, i: d + b"extra" * 200, CUT, None, "other bytes than the two zero blocks"),
        (lambda d, i: d + bytes(512), CUT, None, "other bytes than the two zero blocks"),
    ],
    ids=["header", "time", "payload", "padding", "boundary", "inside", "end", "more", "zeros"],
)
def test_damaged_tar(
    damage: Callable[[bytes, ShardIndex], bytes],
    checks: list[str],
    row: int | None,
    words: str,
    dataset: Path,
) -> None:
    """Found by the hash and the size of the whole, and named by member."""
    index = read_index(dataset)
    (dataset / TAR).write_bytes(damage((dataset / TAR).read_bytes(), index))
    report = validate_dataset(str(dataset))
    named = {"crc32", "tar"}
    key = "" if row is None else index.key[row]
    assert places(report) == [(check, TAR, key if check in named else "") for check in checks]
    assert words in message(report, (named & set(checks)).pop())


def retimed(data: bytes, place: int) -> bytes:
    member = tarfile.TarInfo.frombuf(data[place : place + 512], "utf-8", "strict")
    member.mtime = 1
    return data[:place] + member.tobuf(tarfile.USTAR_FORMAT) + data[place + 512 :]


@pytest.mark.parametrize(
    ("name", "cut", "expected"),
    [
        (TAR, False, [("files", TAR)]),
        (INDEX, False, [("files", TAR)]),
        ("dead_letters.jsonl", False, [("files", "")]),
        (INDEX, True, [("files", TAR), ("index", TAR), ("sha256", TAR)]),
    ],
)
def test_missing_and_cut_files(
    name: str, cut: bool, expected: list[tuple[str, str]], dataset: Path
) -> None:
    data = (dataset / name).read_bytes()
    (dataset / name).unlink()
    if cut:
        (dataset / name).write_bytes(data[: len(data) // 2])
    report = validate_dataset(str(dataset))
    assert places(report) == [(*place, "") for place in expected]
    assert cut or "there is no such file" in report.findings[0].message
    assert cut or RESTORE in report.findings[0].message


@pytest.mark.parametrize("name", [TAR, "dead_letters.jsonl"])
def test_what_another_user_has_closed_is_not_deleted(
    name: str, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = Dataset.open_file

    def refuse(self: Dataset, asked: str) -> BinaryIO:
        if asked == name:  # root, who may run the tests, can read every file
            raise PermissionError(errno.EACCES, "Permission denied", asked)
        return open_file(self, asked)

    monkeypatch.setattr(Dataset, "open_file", refuse)
    (finding,) = validate_dataset(str(dataset)).findings
    closed = f"{name} can't be read: it is closed to you by its permissions; change them"
    assert finding.message == closed


def test_shard_listed_twice(dataset: Path) -> None:
    manifest = read_manifest(str(dataset))
    shards = (*manifest.shards, manifest.shards[1])
    (dataset / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, shards=shards)))
    report = validate_dataset(str(dataset))
    keys = read_index(dataset).key
    expected = [("duplicate_keys", TAR, key) for key in keys]
    assert places(report) == [*expected, ("manifest", "", "")]
    assert message(report, "duplicate_keys") == f"the key is already in {TAR}"
    assert message(report, "manifest") == f"shard {TAR} is listed 2 times"


def widen_span(document: AlignedDocument) -> AlignedDocument:
    spans = document.teacher_spans.copy()
    spans[5, 1] += 1
    return replace(document, teacher_spans=spans)


def other_ids(document: AlignedDocument, side: str, ids: dict[int, int]) -> AlignedDocument:
    tokens = getattr(document, side)
    input_ids = tokens.input_ids.copy()
    input_ids[list(ids)] = list(ids.values())
    return replace(document, **{side: replace(tokens, input_ids=input_ids)})


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        (widen_span, "spans", "student token 5 has "),
        (
            lambda d: other_ids(d, "teacher", {2: 480, 4: 65535}),
            *("input_ids", "teacher token 2 has id 480, the vocabulary 480 (first of 2)"),
        ),
        # In the vocabulary: only the text knows better.
        (lambda d: other_ids(d, "student", {3: 7}), "tokenization", "student token 3 is id 7 "),
        (lambda d: replace(d, text_sha256="0" * 64), "text", "the sample says 0000000000000000…"),
    ],
)
def test_altered_sample(
    change: Callable[[AlignedDocument], AlignedDocument], check: str, words: str, dataset: Path
) -> None:
    """Every hash and CRC fits: the lie is in the arrays."""
    edit_document(dataset, 1, change)
    report = validate_dataset(str(dataset), with_tokenizers=check == "tokenization")
    assert places(report) == [(check, TAR, read_index(dataset).key[1])]
    assert words in message(report, check)


def test_lengths_that_do_not_cover_the_text(dataset: Path) -> None:
    index = read_index(dataset)
    start, size = int(index.payload_offset[0]), int(index.payload_bytes[0])
    whole = decode_document((dataset / TAR).read_bytes()[start : start + size])
    offsets = whole.student.byte_offsets.copy()
    offsets[-1, 1] -= 1
    shorter = replace(whole, student=replace(whole.student, byte_offsets=offsets), text=None)
    num_bytes, must_tile = np.array([whole.num_text_bytes]), np.ones(1, np.bool_)
    sound, short = stack_documents([whole]), stack_documents([shorter])
    assert not list(find_unsound_offsets(sound.student, num_bytes, must_tile))
    assert list(find_unsound_offsets(short.student, num_bytes, must_tile)) == [
        (0, f"tokens cover {num_bytes[0] - 1} of {num_bytes[0]} bytes of text")
    ]


@pytest.mark.parametrize(
    ("column", "row", "change", "expected", "words"),
    [
        ("cut_teacher", 0, 1, ["cut_points"], "divides a token or is out of order"),
        ("num_teacher_tokens", 4, 1, ["", "counts"], "num_teacher_tokens is "),
        ("num_mapped", 1, 1, ["counts"], "num_mapped is "),
        ("byte_iou_sum", 1, 0.5, ["counts"], "byte_iou_sum is "),
        ("payload_offset", 2, 512, ["index"], "payload_offset of row 2 is "),
    ],
)
def test_altered_index(
    column: str, row: int, change: float, expected: list[str], words: str, dataset: Path
) -> None:
    index = read_index(dataset)
    values = getattr(index, column).copy()
    values[row] += change
    edit_index(dataset, **{column: values})
    report = validate_dataset(str(dataset))
    if column == "cut_teacher":
        row = int(np.searchsorted(index.cut_starts, row, side="right")) - 1
    assert places(report) == [
        (check or "counts", TAR, index.key[row] if check else "") for check in expected
    ]
    assert words in message(report, expected[-1])


@pytest.mark.parametrize("in_the_sample", [False, True])
def test_a_document_under_a_foreign_key(in_the_sample: bool, dataset: Path) -> None:
    """Renamed in the index alone, or everywhere: then its key is another document's."""
    index = read_index(dataset)
    other = "doc-0-" + "z" * (len(index.document_id[0]) - 6)
    if in_the_sample:
        edit_document(dataset, 0, lambda document: replace(document, document_id=other))
    edit_index(dataset, document_id=[other, *index.document_id[1:]])
    report = validate_dataset(str(dataset))
    assert places(report) == [("key", TAR, index.key[0])]
    words = f'document "{other}" has the key ' if in_the_sample else f'the index says "{other}"'
    assert words in message(report, "key")


def test_a_key_too_long_for_a_tar(dataset: Path) -> None:
    index = read_index(dataset)
    edit_index(dataset, key=["f" * 200, *index.key[1:]])
    report = validate_dataset(str(dataset))
    assert places(report) == [("tar", TAR, "f" * 200)]
    assert message(report, "tar").startswith(f"tar member is '{index.key[0]}.safetensors' with ")


@pytest.mark.filterwarnings("error")
def test_an_offset_beyond_any_file(dataset: Path) -> None:
    offsets = read_index(dataset).payload_offset.copy()
    offsets[2] = np.iinfo(np.int64).max
    edit_index(dataset, payload_offset=offsets)
    assert "of row 2 is 9223372036854775807, but" in message(
        validate_dataset(str(dataset)), "index"
    )


def test_altered_counts_and_statistics(dataset: Path) -> None:
    """Totals and fingerprint are as they were."""
    path = dataset / MANIFEST_FILE
    body = json.loads(path.read_bytes())
    body["statistics"]["byte_iou_sum"] *= 1.001
    body["statistics"]["span_width_counts"][1] += 1
    path.write_text(json.dumps(body))
    assert places(validate_dataset(str(dataset))) == [("statistics", "", "")] * 2
    body["shards"][1]["num_student_tokens"] += 1
    path.write_text(json.dumps(body))
    report = validate_dataset(str(dataset))
    assert places(report) == [("counts", TAR, ""), ("manifest", "", "")]
    assert "totals" in message(report, "manifest")


def test_altered_dead_letters(dataset: Path) -> None:
    with (dataset / "dead_letters.jsonl").open("a") as file:
        file.write('{"reason": "too_large"}\nnot json\n')
    report = validate_dataset(str(dataset))
    assert [check for check, _, _ in places(report)] == ["dead_letters", "dead_letters", "sha256"]
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
    manifest = read_manifest(str(dataset))
    teacher = store_tokenizer(dataset, "teacher", byte_level(300))
    teacher = replace(teacher, vocab_size=manifest.teacher.vocab_size)
    (dataset / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, teacher=teacher)))
    assert validate_dataset(str(dataset)).findings == ()
    report = validate_dataset(str(dataset), with_tokenizers=True)
    assert all(finding.message.startswith("teacher") for finding in report.findings)
    assert [check for check, _, _ in places(report)] == ["manifest", *["tokenization"] * 24]
    assert message(report, "manifest") == "teacher.vocab_size is 480, its tokenizer says 300"


def test_every_check_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    sources = "".join(path.read_text() for path in Path(score_checks.__file__).parent.glob("*.py"))
    used = re.findall(r'(?:\.add|Finding)\(\s*"(\w+)"', sources)
    listed = re.findall(r"^  (\w+) ", capsys.readouterr().out.partition("checks:")[2], re.M)
    assert {*used, score_checks.CHECK} <= {*listed}
    assert "chats" in used


def test_command_on_a_sound_dataset(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(pristine), "--tokenizers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 shards, 24 documents, ")
    clean = f"clean: {pristine} keeps every rule"
    assert lines[1:] == ["24 kept texts tokenized again by both tokenizers", clean]
    assert main([str(pristine)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [clean]


def test_command_with_findings(
    dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.validate.command.SHOWN_PER_CHECK", 2)
    index = read_index(dataset)
    data = (dataset / TAR).read_bytes()
    for row in range(5):
        data = flip(data, start_of(index, row) + 1)
    (dataset / TAR).write_bytes(data)
    assert main([str(dataset)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"crc32: {TAR}: {sorted(index.key[:5])[0]}: payload has CRC-32 ")
    assert lines[2] == f"crc32: {TAR}: 3 more like these (--json lists all)"
    assert lines[-1] == "6 findings: crc32 5, sha256 1"
    assert main([str(dataset), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["clean"], body["totals"]["num_shards"]) == (False, 3)
    assert body["findings"] == [asdict(f) for f in validate_dataset(str(dataset)).findings]


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
    assert all(line.startswith("hint: ") for line in captured.err.splitlines()[1:])
    assert captured.err.startswith(f"vocag validate: {words}")


def test_metadata_that_the_manifest_does_not_name(dataset: Path) -> None:
    index = read_index(dataset)
    scores = pa.chunked_array([pa.array([None] * len(index), pa.float64())])
    edit_index(dataset, metadata={"score": scores})
    assert message(validate_dataset(str(dataset)), "index").endswith(
        "has metadata ['score (double)'], the manifest names []"
    )


def test_hostile_names_do_not_reach_the_terminal(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = read_index(dataset)
    edit_index(dataset, document_id=["\x1b[2J", *index.document_id[1:]])
    assert main([str(dataset)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
