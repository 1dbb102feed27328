"""Takedowns: a generation that leaves documents out, whatever becomes of the command."""

import io
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import storage
from beam_jobs.align.options import parse_options
from beam_jobs.job_errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK, hold_lock
from beam_jobs.remove.command import main
from beam_jobs.remove.options import RemoveOptions
from beam_jobs.remove.removal import read_ids, remove
from pipeline.dataset.files import open_dataset
from pipeline.validate.dataset_checks import validate_dataset
from schemas.document import document_key
from schemas.errors import DatasetError
from schemas.manifest import encode_manifest
from schemas.removed import RemovedDocuments, encode_removed
from tests.support.chats import SYSTEM, TWO_TURNS, align_chats_job
from tests.support.datasets import build_dataset, files_of, seen_ids

ALL = {f"doc-0-{number}" for number in range(24)}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    build_dataset(tmp_path / "aligned")
    return tmp_path / "aligned"


def write_ids(folder: Path, *ids: str) -> str:
    path = folder / "ids.txt"
    path.write_text("".join(f"{name}\n" for name in ids), "utf-8")
    return str(path)


def test_chats_are_not_sent_to_a_command_that_refuses_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = align_chats_job(tmp_path, [TWO_TURNS, SYSTEM])
    capsys.readouterr()
    assert main([str(output), "--ids", write_ids(tmp_path, "chat-0")]) == 0
    shown = capsys.readouterr().out
    assert "next: align the conversations again without these" in shown
    assert "vocag align" not in shown


def test_documents_leave_and_shards_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "aligned"
    first = build_dataset(output)
    before = files_of(output)
    assert main([str(output), "--ids", write_ids(tmp_path, "doc-0-3", "doc-0-20")]) == 0
    shown = capsys.readouterr().out
    assert "2 documents removed" in shown
    assert "the shards still hold removed documents, and readers other than vocag" in shown
    (command,) = re.findall(r"next: vocag align (.*)  # writes a dataset without them", shown)
    named = parse_options([*shlex.split(command)])
    assert named.input == (str(output),)
    card = (output / "README.md").read_text("utf-8")
    assert "`webdataset`, `datasets`, pandas and DuckDB still" in card
    recipe = card.rpartition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    exec(
        recipe.replace("this folder or its URL", str(output)).replace('glob("', f'glob("{output}/'),
        found,
    )
    assert set(found["index"]["document_id"]) == ALL - {"doc-0-3", "doc-0-20"}
    assert open_dataset(output).removed_keys() == set(map(document_key, ("doc-0-3", "doc-0-20")))
    assert seen_ids(output) == ALL - {"doc-0-3", "doc-0-20"}
    assert main([str(output), "--ids", write_ids(tmp_path, "doc-0-3", "doc-0-1")]) == 0
    shown = capsys.readouterr().out
    assert "1 document removed; 1 of the list removed before" in shown
    assert "generation 2" in shown
    gone = {"doc-0-3", "doc-0-20", "doc-0-1"}
    assert [seen_ids(output, n) for n in (0, 1, 2)] == [
        ALL,
        ALL - {"doc-0-3", "doc-0-20"},
        ALL - gone,
    ]
    after = files_of(output)
    manifest = open_dataset(str(output)).manifest
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {
        *("manifest.json", "manifests/000.json", "manifests/001.json", "README.md"),
        *("removed-g001.parquet", "removed-g002.parquet"),
    }
    assert after["manifests/000.json"] == before["manifest.json"]
    assert manifest.totals == first.totals
    assert manifest.generations[0].fingerprint == first.fingerprint
    assert len({first.fingerprint, manifest.fingerprint, manifest.generations[1].fingerprint}) == 3
    card = after["README.md"].decode()
    assert manifest.fingerprint in card
    assert "| documents | 21 |" in card
    assert "| removed | 3 documents, still in the shards |" in card
    assert validate_dataset(str(output)).findings == ()


def test_nothing_is_left_to_do(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = write_ids(tmp_path, "doc-0-3")
    with hold_lock(str(output / OUTPUT_LOCK), str(output)):  # it writes nothing
        remove(RemoveOptions(str(output), ids, dry_run=True))
    assert "1 document would be removed" in capsys.readouterr().out
    assert seen_ids(output) == ALL
    assert remove(RemoveOptions(str(output), ids, quiet=True)).generation == 1
    assert remove(RemoveOptions(str(output), ids, quiet=True)).generation == 1
    assert capsys.readouterr().out == ""


def test_unknown_ids_are_refused_or_counted(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(output)
    ids = write_ids(tmp_path, "doc-0-3", "nobody", "doc-0-30")
    assert main([str(output), "--ids", ids]) == 2
    said = capsys.readouterr().err
    assert "2 ids of no document" in said
    assert '"nobody", "doc-0-30"; nothing is removed' in said
    assert files_of(output) == before
    assert main([str(output), "--ids", ids, "--ignore-unknown"]) == 0
    assert "1 document removed; 2 ids of no document" in capsys.readouterr().out
    assert seen_ids(output) == ALL - {"doc-0-3"}


def test_standard_input_and_the_manifest_s_name(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"doc-0-3\n")))
    assert main([str(output / "manifest.json"), "--ids", "-"]) == 0
    assert seen_ids(output) == ALL - {"doc-0-3"}
    monkeypatch.setattr("sys.stdin", None)  # closed
    with pytest.raises(OptionsError, match="--ids - lists no id"):
        read_ids("-")


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        ("a.txt", "one\r\n\n{two\n three\n", ["one", "{two", " three"]),
        ("a.jsonl", '{"document_id": "é"}\n{"id": 7}\n"x"\n{"id": "é"}\n', ["é", "7", "x"]),
        ("a.ndjson", '{"document_id": null, "id": "y"}', ["y"]),
        ("windows.txt", "\ufeffone\r\ntwo\r\n", ["one", "two"]),
        ("windows.jsonl", '\ufeff{"id": "one"}\r\n', ["one"]),
    ],
)
def test_lists(tmp_path: Path, name: str, text: str, ids: list[str]) -> None:
    (tmp_path / name).write_text(text, "utf-8", newline="")
    assert read_ids(str(tmp_path / name)) == ids


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\n \n", "lists no id"),
        ("a.txt", b"one\n\xff\n", "line 2 holds no id"),
        ("a.jsonl", b'{"id": "a"}\n\n{"name": "b"}', "line 3 holds no id"),
        ("a.jsonl", b"true", "line 1 holds no id"),
        ("powershell.txt", "one\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    ],
)
def test_lists_without_ids(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(OptionsError, match=message):
        read_ids(str(tmp_path / name))
    with pytest.raises(OptionsError, match="is not there"):
        read_ids(str(tmp_path / "missing.txt"))


def test_what_is_no_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--ids", write_ids(tmp_path, "a")]) == 2
    assert "holds no manifest.json" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["ids.txt"]


class KilledError(BaseException):
    """Ends the command at once, as SIGKILL would."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the `number`th change to the dataset be the last thing that does not happen."""
    left = [number]

    def dies(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KilledError
            return original(*arguments, **options)

        return call

    for name in ("write_atomically", "remove_folder"):
        monkeypatch.setattr(storage, name, dies(getattr(storage, name)))
    monkeypatch.setattr(os, "replace", dies(os.replace))


@pytest.mark.parametrize("number", range(9))
def test_killed_anywhere_and_run_again(
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    other = shutil.copytree(output, tmp_path / "other")
    options = [RemoveOptions(str(o), write_ids(tmp_path, "doc-0-3")) for o in (output, other)]
    remove(options[1])
    capsys.readouterr()
    with monkeypatch.context() as patch:
        kill_at(patch, number)
        with pytest.raises(KilledError):
            remove(options[0])
    is_removed = "1 document removed" in capsys.readouterr().out
    assert seen_ids(output) == (ALL - {"doc-0-3"} if is_removed else ALL)
    remove(options[0])
    assert files_of(output) == files_of(other)


def test_earlier_generations_are_checked(output: Path, tmp_path: Path) -> None:
    remove(RemoveOptions(str(output), write_ids(tmp_path, "doc-0-3"), quiet=True))
    with pytest.raises(DatasetError, match="has no generation 2: its generations are 0 … 1"):
        open_dataset(str(output), generation=2)
    kept = output / "manifests/000.json"
    body = json.loads(kept.read_bytes())
    kept.write_bytes((output / "manifest.json").read_bytes())
    with pytest.raises(DatasetError, match=r"generation 0 had .*restore the file"):
        open_dataset(str(output), generation=0)
    assert [f.check for f in validate_dataset(str(output)).findings] == ["generations"]
    kept.unlink()
    assert [f.check for f in validate_dataset(str(output)).findings] == ["generations"]
    kept.write_text(json.dumps(body))
    assert validate_dataset(str(output)).findings == ()


def test_a_wrong_list_is_found(output: Path, tmp_path: Path) -> None:
    manifest = remove(RemoveOptions(str(output), write_ids(tmp_path, "doc-0-3"), quiet=True))

    def relist(shard: list[int], document: list[int], **changes: Any) -> list[str]:
        """Let the manifest name another list; return what is found."""
        data = encode_removed(RemovedDocuments(np.array(shard), np.array(document)))
        (output / "removed-g001.parquet").write_bytes(data)
        assert manifest.removed is not None
        given = {"sha256": sha256(data).hexdigest(), "count": len(shard)} | changes
        other = replace(manifest, removed=replace(manifest.removed, **given))
        (output / "manifest.json").write_bytes(encode_manifest(other))
        return messages()

    def messages() -> list[str]:
        findings = validate_dataset(str(output)).findings
        return [f"{finding.check}: {finding.message}" for finding in findings]

    assert [m.rpartition("names ")[2] for m in relist([0, 7], [99, 0])] == [
        "document 0 of shard 7: there is none",
        "document 99 of shard 0: there is none",
    ]
    (wrong,) = relist([1], [0], count=2)
    assert "removed-g001.parquet lists 1 documents, the manifest says 2" in wrong
    assert "not in order" in relist([1, 0], [0, 0])[0]
    more = RemoveOptions(str(output), write_ids(tmp_path, "doc-0-4"))
    shorter = encode_removed(RemovedDocuments(np.array([0]), np.array([0])))
    (output / "removed-g001.parquet").write_bytes(shorter)
    assert [m.partition(":")[0] for m in messages()] == ["removed"]
    with pytest.raises(DatasetError, match="is not the list that the manifest names"):
        remove(more)
    (output / "removed-g001.parquet").unlink()
    assert [m.partition(":")[0] for m in messages()] == ["removed"]
    with pytest.raises(DatasetError, match=r"removed-g001\.parquet is missing: restore it"):
        remove(more)
