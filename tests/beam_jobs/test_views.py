"""Views: what a fresh alignment of the pair gives, whatever happens on the way."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from beam_jobs.errors import OptionsError
from beam_jobs.views import steps
from beam_jobs.views.command import MissingTextError, run_command
from beam_jobs.views.options import ViewRequest, parse_request
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.tokenization import Tokenizer
from schemas.errors import DatasetError
from schemas.index import ShardIndex
from schemas.manifest import MANIFEST_FILE, decode_manifest, encode_manifest
from schemas.view_file import Side
from tests.support.datasets import build_dataset, make_texts, word_pieces
from tests.support.killing import killed_at
from tests.support.tokenizer_zoo import source
from tests.support.views import STUDENT, TEACHER, add, write_dataset
from vocag_cli import COMMANDS

OWN_PLACES = {"payload_offset", "payload_bytes", "crc32", "metadata"}


def arguments_of(folder: Path, tokenizer: str, *more: str) -> list[str]:
    return [str(folder), "--teacher", str(source(tokenizer)), "--name", "other", *more]


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_dataset(viewed: Dataset, fresh: Dataset) -> None:
    """Compare every sample's bytes, and what manifest and index say of tokens."""
    for count in ("num_documents", "num_student_tokens", "num_teacher_tokens"):
        assert viewed.manifest.totals[count] == fresh.manifest.totals[count]
    np.testing.assert_equal(viewed.manifest.statistics, fresh.manifest.statistics)
    for shard in range(len(fresh.manifest.shards)):
        index = viewed.read_index(shard, with_names=True)
        expected = fresh.read_index(shard, with_names=True)
        for field in fields(ShardIndex):
            if field.name not in OWN_PLACES:
                found, wanted = getattr(index, field.name), getattr(expected, field.name)
                np.testing.assert_array_equal(found, wanted, err_msg=field.name)
        samples = [bytes(sample) for _, sample in viewed.samples(shard, index)]
        assert samples == [bytes(sample) for _, sample in fresh.samples(shard, expected)]


@pytest.mark.parametrize("keep_text", [False, True])
@pytest.mark.parametrize("other", ["qwen_like", "word_pieces", "sentencepiece_unigram", "nfc"])
@pytest.mark.parametrize("side", ["teacher", "student"])
def test_a_view_is_a_fresh_alignment(
    tmp_path: Path, side: Side, other: str, keep_text: bool
) -> None:
    pair = {"student": STUDENT, "teacher": TEACHER, side: other}
    write_dataset(tmp_path / "data", keep_text=keep_text)
    write_dataset(tmp_path / "fresh", **pair, keep_text=keep_text)
    before = files_of(tmp_path / "data")
    add(tmp_path / "data", other, side=side)
    after = files_of(tmp_path / "data")
    assert {name for name in before if after[name] != before[name]} == {MANIFEST_FILE}
    assert_same_dataset(
        open_dataset(tmp_path / "data", view="other"), open_dataset(tmp_path / "fresh")
    )
    plain = open_dataset(tmp_path / "data")
    before_it = decode_manifest(encode_manifest(replace(plain.manifest, views=())))
    assert plain.manifest.fingerprint == before_it.fingerprint
    assert not list((tmp_path / "data").glob(".vocag*"))


def test_the_command_tells_what_it_did_and_does_it_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path)
    assert run_command("teacher", arguments_of(tmp_path, "qwen_like")) == 0
    shown = capsys.readouterr().out
    assert 'view "other": 24 documents in' in shown
    assert "3 and their indices" in shown
    assert "next: vocag validate" in shown
    before = files_of(tmp_path)
    monkeypatch.setattr(steps, "add_shard", None)  # raises where it is called
    assert run_command("teacher", arguments_of(tmp_path, "qwen_like")) == 0
    assert 'view "other" is finished' in capsys.readouterr().out
    assert files_of(tmp_path) == before
    assert run_command("teacher", arguments_of(tmp_path, "unigram")) == 2
    assert "has a view of that name already" in capsys.readouterr().err
    context = arguments_of(tmp_path, "qwen_like", "--teacher-context", "none")
    assert run_command("teacher", context) == 2
    assert files_of(tmp_path) == before


def test_views_stand_side_by_side(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    add(tmp_path, "unigram", name="z")
    first = files_of(tmp_path)
    manifest = add(tmp_path, "qwen_like", side="student", name="a")
    assert [(view.name, view.side) for view in manifest.views] == [
        ("a", "student"),
        ("z", "teacher"),
    ]
    after = files_of(tmp_path)
    assert {name for name in first if after[name] != first[name]} == {MANIFEST_FILE}
    assert len({view.fingerprint for view in manifest.views}) == 2


def test_texts_that_nobody_knows_are_counted_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = word_pieces()
    build_dataset(tmp_path, make_texts(24), student=lossy, teacher=lossy, keep_text=False)
    before = files_of(tmp_path)
    assert run_command("teacher", arguments_of(tmp_path, "qwen_like")) == 2
    message = capsys.readouterr().err
    assert " of the first " in message
    assert "keep no text" in message
    assert "again with --keep-text" in message
    assert files_of(tmp_path) == before


def test_all_texts_that_are_missing_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_dataset(tmp_path)
    before = files_of(tmp_path)
    known, lost = steps.text_of, {"doc-0-3", "doc-0-4", "doc-0-17"}
    monkeypatch.setattr(
        steps,
        "text_of",
        lambda document, dataset: (
            None if document.document_id in lost else known(document, dataset)
        ),
    )
    total = manifest.totals["num_documents"]
    with pytest.raises(MissingTextError, match=rf"^3 of {total} documents of .* neither the"):
        add(tmp_path, "qwen_like")
    assert files_of(tmp_path) == before


def test_documents_that_the_tokenizer_refuses_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path)
    tokenize = Tokenizer.tokenize_batch

    def fail(tokenizer: Tokenizer, texts: Sequence[bytes]) -> object:
        refused = [place for place, text in enumerate(texts) if text.startswith((b"3.", b"17."))]
        return replace(tokenize(tokenizer, texts), failures=dict.fromkeys(refused, "refused"))

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "tokenize_batch", fail)
        patch.setattr(Tokenizer, "check_fast_path", lambda *_: None)
        view = add(tmp_path, "qwen_like").views[0]
    viewed = open_dataset(tmp_path, view="other")
    assert not viewed.is_whole
    assert view.statistics["num_documents"] == 22
    left_out = set()
    for shard, file in enumerate(view.files):
        index, places = viewed.read_index(shard, with_names=True), viewed.removed_of(shard)
        assert len(places) == file.num_left_out
        assert np.flatnonzero(index.num_teacher_tokens == 0).tolist() == places.tolist()
        assert len(list(viewed.samples(shard, index))) == len(index) - len(places)
        left_out |= {index.document_id[place] for place in places}
    assert left_out == {"doc-0-3", "doc-0-17"}


def test_a_dataset_that_has_grown_is_completed(tmp_path: Path) -> None:
    whole = write_dataset(tmp_path / "data")
    write_dataset(tmp_path / "at_once")
    add(tmp_path / "at_once", "qwen_like")
    path = tmp_path / "data" / MANIFEST_FILE
    path.write_bytes(encode_manifest(replace(whole, shards=whole.shards[:2])))
    early = add(tmp_path / "data", "qwen_like")
    path.write_bytes(encode_manifest(replace(whole, views=early.views)))
    with pytest.raises(DatasetError, match="has files for 2 of 3 shards: the dataset has grown"):
        open_dataset(tmp_path / "data", view="other")
    before = files_of(tmp_path / "data")
    add(tmp_path / "data", "qwen_like")
    after = files_of(tmp_path / "data")
    assert {name for name in before if after[name] != before[name]} == {MANIFEST_FILE}
    assert after == files_of(tmp_path / "at_once")


def test_a_file_that_is_gone_is_made_again(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    add(tmp_path, "qwen_like")
    before = files_of(tmp_path)
    next(tmp_path.glob("*.view-other.bin")).unlink()
    add(tmp_path, "qwen_like")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        pytest.param("views.steps", "view_file_record", 2),  # files of a shard, no commit
        pytest.param("storage", "publish", 1, marks=pytest.mark.slow),
        pytest.param("storage", "write_atomically", 7, marks=pytest.mark.slow),  # a commit
        pytest.param("views.command", "encode_manifest", 1, marks=pytest.mark.slow),
        pytest.param("storage", "remove_folder", 1, marks=pytest.mark.slow),  # all but tidied up
    ],
)
def test_a_killed_job_then_a_second_start(
    tmp_path: Path, module: str, function: str, call: int
) -> None:
    write_dataset(tmp_path / "data")
    write_dataset(tmp_path / "never")
    add(tmp_path / "never", "qwen_like")
    script = killed_at("beam_jobs.views.add_teacher", module, function, call=call)
    killed = subprocess.run(
        [sys.executable, "-c", script, *arguments_of(tmp_path / "data", "qwen_like")],
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert list((tmp_path / "data").glob(".vocag-*"))
    assert run_command("teacher", arguments_of(tmp_path / "data", "qwen_like")) == 0
    assert files_of(tmp_path / "data") == files_of(tmp_path / "never")


@pytest.mark.slow
def test_two_processes_give_the_same_files(tmp_path: Path) -> None:
    for name, more in (("one", ()), ("two", ("--workers", "2"))):
        write_dataset(tmp_path / name)
        assert run_command("teacher", arguments_of(tmp_path / name, "qwen_like", *more)) == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("Qwen/Qwen2.5-Math-7B", "Qwen2.5-Math-7B"),
        ("models/llama 2/tokenizer.json", "llama-2"),
        ("models/llama/tokenizer.model.v1", "llama"),
        ("tokenizer.json", "tokenizer.json"),
    ],
)
def test_a_view_is_named_after_its_tokenizer(tokenizer: str, name: str) -> None:
    assert parse_request("teacher", ["aligned", "--teacher", tokenizer]).view_name == name


@pytest.mark.parametrize("name", ["a/b", ".hidden", "x" * 65, "two words"])
def test_names_that_can_be_no_file_are_refused(name: str) -> None:
    with pytest.raises(OptionsError, match=r"--name .* must be at most 64 letters"):
        ViewRequest("aligned", "teacher", "t", name)


def test_the_commands_are_registered_and_teach(capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("teacher", "student"):
        assert COMMANDS[f"add-{side}"][0] == f"beam_jobs.views.add_{side}"
        with pytest.raises(SystemExit, match="0"):
            run_command(side, ["--help"])  # type: ignore[arg-type]
        shown = capsys.readouterr().out
        assert f"vocag add-{side} aligned --{side}" in shown
        assert "--view" in shown


def test_the_manifest_says_where_everything_lies(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    add(tmp_path, "qwen_like")
    (view,) = json.loads((tmp_path / MANIFEST_FILE).read_bytes())["views"]
    named = [file[key] for file in view["files"] for key in ("file", "index_file")]
    assert all((tmp_path / name).is_file() for name in [*named, view["tokenizer"]["file"]])
