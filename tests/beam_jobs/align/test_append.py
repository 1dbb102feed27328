"""Datasets that grow: new shards next to the old ones, whatever interrupts the command."""

import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from beam_jobs.align import steps
from beam_jobs.align.__main__ import main
from beam_jobs.align.bucket_blocks import holds_taken_ids, pack_blocks
from beam_jobs.align.buckets import unpack
from beam_jobs.align.command import align, describe
from beam_jobs.align.inputs.documents import PlacedDocument
from beam_jobs.align.inputs.taken_ids import TakenId
from beam_jobs.job_errors import InputError, JobError, OptionsError, TooManyDeadLettersError
from beam_jobs.resuming import close_run
from beam_jobs.running.run_options import RunOptions
from pipeline.command_line.failures import hints_of
from pipeline.dataset.files import open_dataset
from pipeline.validate.dataset_checks import validate_dataset
from schemas.errors import DatasetError
from tests.support.corpus import fail
from tests.support.datasets import files_of, remove_documents
from tests.support.growing import documents, grow, options, write_input
from tests.support.killing import run_killed

FIRST = [f"a{number}" for number in range(30)]
SECOND = [f"b{number}" for number in range(20)]


def stable(files: dict[str, bytes]) -> dict[str, bytes]:
    return {n: data for n, data in files.items() if n not in ("report.html", "inputs.json")}


def letters_of(folder: Path, file: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / file).read_text("utf-8").splitlines()]


def test_a_dataset_grows_and_what_was_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "aligned"
    first = grow(tmp_path, "a", FIRST)
    before = files_of(folder)
    second = grow(tmp_path, "b", [*SECOND, "a7", "b3"])
    after = files_of(folder)
    assert second.generation == 1
    assert second.shards[: len(first.shards)] == first.shards
    names = [shard.file for shard in second.newest_shards]
    assert names == [f"corpus-g001-{n:06d}-of-{len(names):06d}.tar" for n in range(len(names))]
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"manifest.json", "report.html", "README.md", "inputs.json"}
    assert after["manifests/000.json"] == before["manifest.json"]
    assert not [name for name in after if name.startswith(".vocag")]
    assert documents(folder).keys() == {*FIRST, *SECOND}
    assert documents(folder, generation=0).keys() == set(FIRST)
    assert second.totals["num_documents"] == 50
    assert second.statistics["num_documents"] == 50
    letters = letters_of(folder, "dead_letters-g001.jsonl")
    assert second.dead_letters.by_reason == {"duplicate_id": 1, "known_id": 1}
    details = {str(x["document_id"]): str(x["detail"]) for x in letters}
    assert re.fullmatch(
        r"the dataset has the id already: corpus-\d{6}-of-\d{6}\.tar#\d+", details["a7"]
    )
    assert details["b3"] == "the id was first used at b.jsonl line 4"
    assert {x["document_id"]: x["line"] for x in letters} == {"a7": 21, "b3": 22}
    assert validate_dataset(str(folder)).findings == ()
    card, report = after["README.md"].decode(), after["report.html"].decode()
    assert "| documents | 50 |" in card
    assert "added 20 documents" in report


def test_nothing_new_is_no_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "aligned"
    grow(tmp_path, "a", FIRST)
    manifest = grow(tmp_path, "b", SECOND)
    before = files_of(folder)
    assert grow(tmp_path, "b", SECOND) == manifest
    assert files_of(folder) == before
    with pytest.raises(InputError, match=r"1 file changed since, .*give them other names to add"):
        grow(tmp_path, "b", [*SECOND[1:], "c0"])
    run = RunOptions()
    assert grow(tmp_path, "again", [*FIRST, *SECOND], run=run, max_dead_letters=0) == manifest
    shown = capsys.readouterr().out
    assert "nothing new: " in shown
    assert "has the ids of 50 documents of 50 already; the dataset stays at generation 1" in shown
    assert len(letters_of(folder, "dead_letters-g002.jsonl")) == 50
    assert open_dataset(str(folder)).manifest == manifest
    assert not list(folder.glob(".vocag-*"))
    with pytest.raises(InputError, match="every file is empty or blank"):
        grow(tmp_path, "empty", [])
    path = write_input(tmp_path / "in/bad.jsonl", FIRST)
    with path.open("a") as file:
        file.write("{\n")
    bad = options(tmp_path, path, append=True)
    assert align(replace(bad, max_dead_letters=0.04)) == manifest
    with pytest.raises(InputError, match="no document of the input is both new and usable"):
        align(replace(bad, max_dead_letters=0.03))
    assert grow(tmp_path, "c", ["c1"]).generation == 2
    assert letters_of(folder, "dead_letters-g002.jsonl") == []


def test_the_first_command_is_finished_in_what_grew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "aligned"
    first = grow(tmp_path, "a", FIRST)
    grow(tmp_path, "b", SECOND)
    remove_documents(folder, "a3")
    before = files_of(folder)
    again = options(tmp_path, tmp_path / "in/a.jsonl", run=RunOptions())
    assert align(again) == first
    shown = capsys.readouterr().out
    assert "made its generation 0, and it has grown to generation 2 since; nothing to do" in shown
    with pytest.raises(OptionsError, match=r"--text-field is text there and body here; add") as e:
        align(replace(again, text_field="body"))
    assert "append_to" not in str(e.value)
    with pytest.raises(OptionsError, match=r"configuration: --input is .*add to it by --append"):
        align(replace(again, input=(str(tmp_path / "in/b.jsonl"),)))
    assert files_of(folder) == before
    (folder / "manifests/000.json").unlink()
    with pytest.raises(DatasetError, match=r"manifests/000\.json does not exist: restore the file"):
        align(again)


def test_removed_ids_stay_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grow(tmp_path, "a", FIRST)
    remove_documents(tmp_path / "aligned", "a3")
    manifest = grow(tmp_path, "b", ["a3", "b1"], run=RunOptions())
    told = f"generation      2, with 30 documents in {len(manifest.shards)} shards, and 1 removed"
    assert told in capsys.readouterr().out
    assert manifest.generation == 2
    assert manifest.removed is not None
    assert manifest.removed.count == 1
    assert documents(tmp_path / "aligned").keys() == {*FIRST, "b1"} - {"a3"}
    # The same input as before is done, though documents have left since.
    remove_documents(tmp_path / "aligned", "b1")
    assert grow(tmp_path, "b", ["a3", "b1"]).generation == 3
    assert documents(tmp_path / "aligned").keys() == set(FIRST) - {"a3"}
    assert validate_dataset(str(tmp_path / "aligned")).findings == ()


def test_other_options_are_refused(tmp_path: Path) -> None:
    grow(tmp_path, "a", FIRST)
    inputs = write_input(tmp_path / "in/b.jsonl", SECOND)
    before = files_of(tmp_path / "aligned")
    good = options(tmp_path, inputs, append=True)
    for change, message, hints in (
        ({"metadata": ""}, "--metadata is source there and not given", ["--metadata source"]),
        ({"text_field": "body"}, "--text-field is text there and body", ["--text-field text"]),
        ({"name": "web"}, "--name is corpus there and web here", ["--name corpus"]),
        ({"keep_text": True}, "--keep-text is not given there and true here", []),
        (
            *({"teacher": good.student}, "--teacher is .*/tokenizers/teacher .* {} .SHA"),
            [],
        ),
    ):
        for call in (align, describe):
            with pytest.raises(OptionsError, match=message.format(good.student)) as caught:
                call(replace(good, **change))
            assert hints_of(caught.value) == [f"hint: {hint}" for hint in hints]
    with pytest.raises(OptionsError, match=r"--input is .*add to it by --append"):
        align(replace(good, append=False))
    with pytest.raises(OptionsError, match=r"holds no manifest\.json"):
        align(replace(good, output=str(tmp_path / "nothing")))
    assert files_of(tmp_path / "aligned") == before
    assert "dry run" in describe(good)[0]
    assert files_of(tmp_path / "aligned") == before


def test_values_that_do_not_fit_the_columns(tmp_path: Path) -> None:
    """A column keeps its type, whatever the new documents hold most."""
    grow(tmp_path, "a", FIRST)
    path = tmp_path / "in/b.jsonl"
    path.write_text('{"id": "b0", "text": "one", "source": 7}\n{"id": "b1", "text": "two"}\n')
    manifest = align(options(tmp_path, path, append=True))
    assert manifest.dead_letters.by_reason == {"bad_metadata": 1}
    assert documents(tmp_path / "aligned")["b1"][0] is None


def test_a_dataset_that_lost_files_does_not_grow(tmp_path: Path) -> None:
    first = grow(tmp_path, "a", FIRST)
    index = tmp_path / "aligned" / first.shards[0].index_file
    data = index.read_bytes()
    index.unlink()
    with pytest.raises(OptionsError, match=r"1 files of .* are gone or cut, such as corpus-"):
        grow(tmp_path, "b", SECOND)
    index.write_bytes(data)
    grow(tmp_path, "b", SECOND)
    index.write_bytes(data[:-1] + b"x")
    with pytest.raises(Exception, match="is not the index that the manifest names"):
        grow(tmp_path, "c", ["c1"])
    index.unlink()
    with pytest.raises(OptionsError, match="restore them"):
        align(replace(options(tmp_path, tmp_path / "in/b.jsonl"), append=True))


def test_dead_letters_are_counted_by_generation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grow(tmp_path, "a", FIRST)
    grown = grow(tmp_path, "b", ["b0", "a0", "a1"], max_dead_letters=0)
    assert grown.dead_letters.by_reason == {"known_id": 2}
    with pytest.raises(TooManyDeadLettersError, match=r"2 of 4 .*duplicate_id 2") as caught:
        grow(tmp_path, "d", ["b1", "b1", "b1", "a1"], max_dead_letters=0.4)
    assert "known_id" not in str(caught.value)
    assert "--id-field" not in str(caught.value)
    assert documents(tmp_path / "aligned").keys() == {*FIRST, "b0", "b1"}
    capsys.readouterr()
    inputs = write_input(tmp_path / "in/c.jsonl", ["c0", "c1"])
    command = command_line(tmp_path, tmp_path / "aligned", inputs)
    assert main([each for each in command if each != "--quiet"]) == 0
    assert "generation      3, with 34 documents in" in capsys.readouterr().out


def test_only_taken_ids_that_meet_a_document_are_held() -> None:
    taken = [TakenId("s.tar", place, f"doc-{place}") for place in range(1000)]
    new = [PlacedDocument("in.jsonl", 0, "doc-7", b"x"), PlacedDocument("in.jsonl", 1, "n", b"y")]
    blocks = [block for part in (taken, new) for _, block in pack_blocks(part, 1)]
    assert [holds_taken_ids(block) for block in blocks] == [True, False]
    assert unpack(lambda: blocks) == [*new, taken[7]]
    once = iter(blocks)  # as no runner does that we know
    with pytest.raises(JobError, match="gave a bucket's blocks once"):
        unpack(lambda: once)


def test_taken_ids_take_no_memory_while_they_are_read() -> None:
    """Those of a huge dataset all come to the one bucket of a small input."""
    ids = [TakenId("s.tar", place, f"{place:0200d}") for place in range(5000)]
    blocks = [block for _, block in pack_blocks(ids, 1)]
    new = [PlacedDocument("in.jsonl", 0, ids[7].document_id, b"x")]
    own = [block for _, block in pack_blocks(new, 1)]
    tracemalloc.start()
    found = unpack(lambda: (bytes(bytearray(b)) for b in chain(own, *[blocks] * 40)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [*new, *[ids[7]] * 40]
    assert peak < 10 * sum(map(len, blocks))


def command_line(root: Path, output: Path, inputs: Path) -> list[str]:
    good = replace(options(root, inputs, append=True), output=str(output))
    arguments = ["--append", "--quiet", "--metadata=source"]
    for name in ("output", "student", "teacher", "shard_bytes", "max_dead_letters"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(good, name))]
    return [*arguments, "--input", str(inputs)]


@pytest.fixture(scope="module")
def appended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, bytes]]:
    """The folder of a dataset, what is added to it, and the files that there are then."""
    root = tmp_path_factory.mktemp("appended")
    grow(root, "a", FIRST)
    inputs = write_input(root / "in/b.jsonl", [*SECOND, "a7"])
    whole = shutil.copytree(root / "aligned", root / "whole")
    assert main(command_line(root, whole, inputs)) == 0
    return root, inputs, stable(files_of(whole))


CHANGES = [f"beam_jobs.storage.{n}" for n in ("write_atomically", "publish", "delete_files")]


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 6, 8, 10, 11, 12, 14])
def test_killed_anywhere_and_run_again(
    tmp_path: Path, appended: tuple[Path, Path, dict[str, bytes]], call: int
) -> None:
    root, inputs, whole = appended
    killed = shutil.copytree(root / "aligned", tmp_path / "killed")
    command = command_line(root, killed, inputs)
    functions = [*CHANGES, "beam_jobs.storage.remove_folder"]
    run_killed("beam_jobs.align.__main__", command, functions, call=call)
    assert documents(killed).keys() in ({*FIRST}, {*FIRST, *SECOND})
    assert main(command) == 0
    assert stable(files_of(killed)) == whole


def test_a_takedown_between_a_kill_and_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(tmp_path, "a", FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "make_manifest", fail)
        with pytest.raises(Exception, match="injected"):
            grow(tmp_path, "b", SECOND)
    assert list((tmp_path / "aligned").glob("corpus-g001-*"))
    remove_documents(tmp_path / "aligned", "a3")
    manifest = grow(tmp_path, "b", SECOND)
    assert manifest.generation == 2
    assert {shard.file[:12] for shard in manifest.newest_shards} == {"corpus-g002-"}
    assert not list((tmp_path / "aligned").glob("corpus-g001-*"))
    assert not list((tmp_path / "aligned").glob(".vocag-*"))
    assert documents(tmp_path / "aligned").keys() == {*FIRST, *SECOND} - {"a3"}
    assert validate_dataset(str(tmp_path / "aligned")).findings == ()


def test_what_an_overtaken_start_left_goes_with_the_next_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts and tars stayed for ever: no command would have continued there."""
    grow(tmp_path, "a", FIRST)
    folder = tmp_path / "aligned"
    with monkeypatch.context() as patch:
        patch.setattr(steps, "make_manifest", fail)
        with pytest.raises(Exception, match="injected"):
            grow(tmp_path, "b", SECOND)
    (left,) = folder.glob(".vocag-*/configuration.json")
    others = folder / ".vocag-others"  # of a job that scores
    shutil.copytree(left.parent, others)
    made = json.loads(left.read_bytes())
    (others / left.name).write_text(json.dumps({**made, "append_to": None}))
    manifest = grow(tmp_path, "c", ["c1"])
    assert [*folder.glob(".vocag-*")] == [others]
    (others / left.name).write_text(json.dumps({**made, "append_to": manifest.fingerprint}))
    close_run(str(folder), str(folder / ".vocag-c"), manifest)  # again, after a kill
    assert [*folder.glob(".vocag-*")] == [others]
