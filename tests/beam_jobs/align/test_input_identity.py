"""Is it still the same input, and is the dataset still there? And input that comes down a pipe."""

import gzip
import io
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.align import dataset_making
from beam_jobs.align import steps as sharding
from beam_jobs.align.__main__ import main
from beam_jobs.align.command import align
from beam_jobs.align.dataset_making import run_job
from beam_jobs.align.inputs import standard_input
from beam_jobs.align.inputs.document_reading import read_part
from beam_jobs.align.inputs.documents import ReadingRules
from beam_jobs.align.inputs.input_files import find_inputs
from beam_jobs.align.inputs.input_identity import InputChangedError, content_of
from beam_jobs.align.inputs.parts import decode_task, plan_tasks
from beam_jobs.align.inputs.standard_input import remove_abandoned
from beam_jobs.align.opened_input import reading_rules
from beam_jobs.align.options import parse_options
from beam_jobs.job_errors import InputError, OptionsError
from beam_jobs.locks import OUTPUT_LOCK
from pipeline.command_line.folder_lock import hold_folder
from pipeline.dataset.dataset_reading import read_manifest
from tests.support.corpus import (
    Corpus,
    align_options,
    command_line,
    digests,
    fail,
    json_line,
    make_text,
    small_corpus,
)
from tests.support.datasets import flip
from tests.support.shelf import SCHEME

LINES = [json_line(f"doc-{n}", make_text(n)) for n in range(40)]
FILES = {"a": LINES[:20], "b": LINES[20:]}


def test_a_changed_input_of_the_same_size_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = small_corpus(tmp_path / "corpus", **FILES)
    command = command_line(align_options(corpus, tmp_path / "out"))
    assert main(command) == 0
    before = digests(tmp_path / "out")
    path = corpus.folder / "in" / "b.jsonl"
    path.write_bytes(path.read_bytes().replace(b"prime", b"emirp"))
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "1 file changed since, such as b.jsonl" in error
    assert digests(tmp_path / "out") == before


def test_a_copy_of_the_input_is_the_same_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    align(align_options(small_corpus(tmp_path / "corpus", **FILES), output))
    copy = small_corpus(tmp_path / "copy", **FILES)
    os.utime(copy.folder / "in" / "a.jsonl", ns=(1, 1))
    capsys.readouterr()
    align(align_options(copy, output))
    printed = capsys.readouterr().out
    assert "nothing to do" in printed
    assert "2 input files have different times" in printed
    align(align_options(copy, tmp_path / "fresh"))
    assert digests(tmp_path / "fresh") == digests(output), "times are nowhere in the dataset"


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 18, 3 << 20])
def test_content_covers_both_ends_and_everything_of_small_files(
    tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(num_bytes))
    whole = content_of(str(path), num_bytes)
    places = {0, num_bytes // 2, num_bytes - 1} if num_bytes <= 1 << 18 else {0, num_bytes - 1}
    for place in places if num_bytes else ():
        flip(path, place)
        assert content_of(str(path), num_bytes) != whole
        flip(path, place)
    assert content_of(str(path), num_bytes) == whole


def test_a_dataset_that_lost_files_is_not_finished(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path / "corpus", **FILES)
    output = tmp_path / "out"
    manifest = align(align_options(corpus, output))
    for name in (manifest.shards[0].file, manifest.shards[0].index_file, manifest.teacher.file):
        data = (output / name).read_bytes()
        (output / name).unlink()
        if name != manifest.teacher.file:
            (output / name).write_bytes(data[:-1])
        with pytest.raises(OptionsError, match=r"1 files of .* are gone or cut"):
            align(align_options(corpus, output))
        (output / name).write_bytes(data)


@pytest.mark.parametrize("change", ["cut", "grown", "rewritten", "removed"])
def test_an_input_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(LINES)))
    (part,) = decode_task(plan_tasks(find_inputs([str(path)]))[0])
    assert len(list(read_part(part, ReadingRules()))) == len(LINES)
    stored = path.read_bytes()
    outcomes = read_part(part, ReadingRules())
    next(outcomes)
    if change == "removed":
        path.unlink()
    elif change == "rewritten":
        path.write_bytes(bytes(reversed(stored)))
        os.utime(path, ns=(1, 1))
    else:
        path.write_bytes(stored[: len(stored) // 2] if change == "cut" else stored * 2)
    with pytest.raises(InputChangedError, match=r"(changed from|was written|was removed)"):
        list(outcomes)


@pytest.mark.parametrize("put", [None, os.mkdir, os.mkfifo])
def test_a_file_that_is_gone_before_it_is_read_is_named(
    tmp_path: Path, put: Callable[[Path], None] | None
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(LINES))
    (part,) = decode_task(plan_tasks(find_inputs([str(path)]))[0])
    path.unlink()
    if put is not None:
        put(path)  # to open a pipe would wait for its writer
    with pytest.raises(InputChangedError, match=r"a\.jsonl (was removed|changed from .*) while"):
        list(read_part(part, ReadingRules()))


def test_a_job_whose_input_is_cut_fails_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = small_corpus(tmp_path / "corpus", **FILES)
    command = command_line(align_options(corpus, tmp_path / "out"))
    path = corpus.folder / "in" / "b.jsonl"
    whole = path.read_bytes()

    def cut_before_reading(*arguments: Any, **options: Any) -> None:
        path.write_bytes(whole[:300])
        run_job(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(dataset_making, "run_job", cut_before_reading)
        assert main(command) == 1
    error = capsys.readouterr().err
    assert f"b.jsonl changed from {len(whole)} to 300 bytes while the job ran" in error
    assert "then run the same command again, which resumes or says how to start anew" in error
    assert main(command) == 2
    assert "hint: mv " in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()
    path.write_bytes(whole)
    assert main(command) == 0
    assert read_manifest(str(tmp_path / "out")).totals["num_documents"] == len(LINES)


def test_what_is_no_readable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES[0])
    (folder / "link.jsonl").symlink_to(tmp_path / "nowhere")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    with pytest.raises(InputError, match=r"link\.jsonl is a link .*nowhere, "):
        find_inputs([f"{folder}/*.jsonl"])
    for name in ("link.jsonl", "loop.jsonl"):
        with pytest.raises(InputError, match=rf"{name} is a link to"):
            find_inputs([f"{folder}/{name}"])
        (folder / name).unlink()
    os.mkfifo(folder / "pipe.jsonl")
    for pattern in ("*", "pipe.jsonl"):
        with pytest.raises(InputError, match=r"pipe\.jsonl is a pipe, .*pipe it into --input -"):
            find_inputs([f"{folder}/{pattern}"])
    (folder / "pipe.jsonl").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "s.jsonl"))
        with pytest.raises(InputError, match=r"s\.jsonl is a pipe, socket"):
            find_inputs([f"{folder}/*"])
    (folder / "s.jsonl").unlink()
    (file,) = find_inputs([f"{folder}/*"])
    assert file.source == "a.jsonl"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root reads everything
    with pytest.raises(InputError, match=r"a\.jsonl is not readable for you"):
        find_inputs([f"{folder}/*"])


def test_a_name_may_hold_a_backslash(tmp_path: Path) -> None:
    """As those in archives of Windows do; such files were skipped without a word."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "sub\\a.txt").write_text("x")
    found = find_inputs([f"{tmp_path}/in/*.txt"], format="text")
    assert [file.path for file in found] == [f"{tmp_path}/in/sub\\a.txt"]


def align_input(
    monkeypatch: pytest.MonkeyPatch, output: Path, data: bytes | None, *, append: bool = False
) -> int:
    """Run the command with some standard input; None closes it."""
    options = align_options(Corpus(output.parent), output, input=("-",))
    with monkeypatch.context() as patch:
        stdin = None if data is None else io.TextIOWrapper(io.BytesIO(data))
        patch.setattr(sys, "stdin", stdin)
        return main([*command_line(options), *["--append"] * append])


@pytest.mark.parametrize("compressed", [False, True])
def test_documents_from_standard_input(
    tmp_path: Path,
    compressed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, output = b"".join(LINES), tmp_path / "out"
    piped = gzip.compress(data, mtime=0) if compressed else data
    assert align_input(monkeypatch, output, piped) == 0
    assert read_manifest(str(output)).totals["num_documents"] == len(LINES)
    assert not list(output.glob(".vocag-*"))
    (source,) = json.loads((output / "inputs.json").read_text())
    assert source == ("stdin.jsonl.gz" if compressed else "stdin.jsonl")
    assert align_input(monkeypatch, output, piped) == 0
    assert "nothing to do" in capsys.readouterr().out
    changed = piped[:1000] + bytes([piped[1000] ^ 1]) + piped[1001:]
    empty = "standard input is empty"
    for other, message in ((changed, "1 file changed since"), (b"", empty), (None, empty)):
        assert align_input(monkeypatch, output, other) == 2
        assert message in capsys.readouterr().err


def test_another_stream_without_ids_is_not_taken_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents that began where an old one had were left out as known."""
    output = tmp_path / "out"
    assert align_input(monkeypatch, output, b'{"text": "one and two"}\n') == 0
    second = b'{"text": "two and seven"}\n'
    assert align_input(monkeypatch, output, second, append=True) == 2
    assert "give every document an id (--id-field)" in capsys.readouterr().err
    second = b'{"id": "b", "text": "two and seven"}\n'
    assert align_input(monkeypatch, output, second, append=True) == 0
    assert read_manifest(str(output)).totals["num_documents"] == 2


def test_a_killed_job_over_standard_input_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = b"".join(LINES), tmp_path / "out"
    (output / ".vocag-stdin-abandoned").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(sharding, "encode_manifest", fail)
        assert align_input(monkeypatch, output, data) == 1
    assert len(list(output.glob(".vocag-*"))) == 1, "the run's folder, no copies"
    assert align_input(monkeypatch, output, data) == 0
    assert read_manifest(str(output)).totals["num_documents"] == len(LINES)


def test_a_stream_is_copied_by_the_lock_s_holder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy made before was taken for an abandoned one by the lock's holder."""
    output, made = tmp_path / "out", []
    monkeypatch.setattr(standard_input, "_copy", lambda *arguments: made.append(arguments))
    with hold_folder(str(output / OUTPUT_LOCK), str(output)):
        assert align_input(monkeypatch, output, b"".join(LINES)) == 2
    assert "wait until it has ended" in capsys.readouterr().err
    assert not made


def test_a_copy_that_a_killed_job_left_in_a_store_is_removed(tmp_path: Path) -> None:
    left, own = (tmp_path / f".vocag-stdin-{name}" / "stdin.jsonl" for name in ("left", "own"))
    for path in (left, own, tmp_path / "corpus.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    url = f"{SCHEME}://{tmp_path}"
    remove_abandoned(url, (f"{url}/.vocag-stdin-own/stdin.jsonl",))
    assert not left.exists()
    assert own.exists()
    assert (tmp_path / "corpus.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-field=a", "--text-field=b"], r"--text-field is given twice; .*--text-template"),
        (["--text-field=a", "--text-template={b}"], "say different things; give one"),
        (["--text-template=b"], "--text-template: the template 'b' names no field"),
    ],
)
def test_options_that_contradict_each_other(arguments: list[str], message: str) -> None:
    given = ["--input=a", "--output=b", "--student=c", "--teacher=d"]
    with pytest.raises(ValueError, match=message):
        reading_rules(parse_options([*given, *arguments]))
