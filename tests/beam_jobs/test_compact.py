"""A dataset without its removed documents: what aligning the rest gives."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from beam_jobs import storage
from beam_jobs.edit import compact as compact_module
from beam_jobs.edit.carried import Carried, CopiedShard, copy_carried
from beam_jobs.edit.compact import CompactOptions, compact, main
from beam_jobs.errors import OptionsError
from beam_jobs.views.command import add_view
from beam_jobs.views.options import ViewRequest
from pipeline.dataset.files import open_dataset
from pipeline.validate.dataset import validate_dataset
from schemas.sidecar import sidecar_name
from tests.beam_jobs.test_views import files_of
from tests.support.growing import QUIET, documents, grow, options, take_out, write_input
from tests.support.killing import killed_at

FIRST = [f"a{number}" for number in range(130)]
GONE = ["a3", "a40", "a41", "a99"]


def shards_of(folder: Path) -> dict[str, bytes]:
    names = [n for s in open_dataset(str(folder)).manifest.shards for n in (s.file, s.index_file)]
    return {name: (folder / name).read_bytes() for name in names}


def test_equal_to_aligning_the_rest_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as many buckets; its own manifest says where it comes from."""
    large = {"repeat": 40, "shard_bytes": 1 << 16}  # a bucket is one shard
    grow(tmp_path / "old", "a", FIRST, **large)
    take_out(tmp_path / "old", GONE)
    grow(tmp_path / "rest", "a", [n for n in FIRST if n not in GONE], **large)
    old, new = tmp_path / "old/aligned", tmp_path / "new"
    buckets = {
        open_dataset(str(folder)).manifest.configuration["num_buckets"]
        for folder in (old, tmp_path / "rest/aligned")
    }
    assert len(buckets) == 1
    assert main([str(old), "--output", str(new)]) == 0
    assert "126 documents, 4 left out" in capsys.readouterr().out
    assert len(shards_of(new)) > 2
    assert shards_of(new) == shards_of(tmp_path / "rest/aligned")
    made, aligned = (open_dataset(str(f)).manifest for f in (new, tmp_path / "rest/aligned"))
    assert made.shards == aligned.shards
    assert made.fingerprint == aligned.fingerprint
    assert made.statistics.keys() == aligned.statistics.keys()
    for name, value in aligned.statistics.items():
        assert made.statistics[name] == pytest.approx(value), name
    assert validate_dataset(str(new)).findings == ()
    assert not list(new.glob(".vocag-*"))
    assert b'"a40"' in b"".join(shards_of(old).values())
    assert b'"a40"' not in b"".join(shards_of(new).values())


def test_generations_become_one(tmp_path: Path) -> None:
    grow(tmp_path, "a", FIRST[:30])
    grow(tmp_path, "b", ["b1", "a1"])
    take_out(tmp_path, ["a3", "b1"])
    expected = documents(tmp_path / "aligned")
    manifest = compact(CompactOptions(str(tmp_path / "aligned"), str(tmp_path / "new"), quiet=True))
    assert documents(tmp_path / "new") == expected
    assert (manifest.generation, manifest.generations, manifest.removed) == (0, (), None)
    assert manifest.dead_letters.by_reason == {"duplicate_id": 1}
    assert all(shard.num_documents for shard in manifest.shards)
    assert validate_dataset(str(tmp_path / "new")).findings == ()
    # The ids are free again.
    inputs = write_input(tmp_path / "in/c.jsonl", ["a3", "c1"])
    from beam_jobs.align.command import align

    align(replace(options(tmp_path, inputs, append=True), output=str(tmp_path / "new")))
    assert documents(tmp_path / "new").keys() == {*expected, "a3", "c1"}


def test_what_stays_behind_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(tmp_path, "a", FIRST[:5])
    old = tmp_path / "aligned"
    (shard,) = open_dataset(str(old)).manifest.shards
    left = sidecar_name(shard.file, "ab12" * 16)  # a run that was killed
    (old / left).write_bytes(b"")
    capsys.readouterr()
    told = (
        f"not copied: 1 sidecar that no score manifest lists, such as {left}: vocag score has not "
        "finished\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(compact_module, "_make", _die)
        with pytest.raises(KeyboardInterrupt):
            compact(CompactOptions(str(old), str(tmp_path / "new")))
    assert capsys.readouterr().out == told
    compact(CompactOptions(str(old), str(tmp_path / "new"), quiet=True))
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "new" / left).exists()


def test_killed_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(tmp_path, "a", FIRST)
    take_out(tmp_path, GONE)
    wanted = CompactOptions(str(tmp_path / "aligned"), str(tmp_path / "new"), quiet=True)
    for name in ("_copy_tokenizer", "publish_manifest", "write_card"):
        with monkeypatch.context() as patch:
            patch.setattr(compact_module, name, _die)
            with pytest.raises(KeyboardInterrupt):
                compact(wanted)
    made = compact(wanted)
    assert documents(tmp_path / "new").keys() == {*FIRST} - {*GONE}
    before = (tmp_path / "new/manifest.json").stat()
    assert compact(wanted) == made
    assert (tmp_path / "new/manifest.json").stat() == before
    assert storage.num_bytes_of(str(tmp_path / "new/README.md"))
    take_out(tmp_path, ["a5"])
    with pytest.raises(OptionsError, match="compacted_from is"):
        compact(wanted)


def test_finished_shards_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a file of theirs was cut, or there is more to copy by now."""
    grow(tmp_path, "a", FIRST, repeat=40, shard_bytes=1 << 16)
    take_out(tmp_path, GONE)
    old, new = tmp_path / "aligned", tmp_path / "new"
    wanted = CompactOptions(str(old), str(new), quiet=True)
    compact(replace(wanted, output=str(tmp_path / "never")))
    expected = shards_of(tmp_path / "never")
    total = len(expected) // 2
    assert total > 3
    copied: list[int] = []
    monkeypatch.setattr(compact_module, "_COPIED_AT_ONCE", 1)

    def attempt(*, end: int = total) -> list[int]:
        """Return the shards that are copied by a command that dies before some shard."""

        def copy(carried: Carried, number: int, output: str, stem: str) -> CopiedShard:
            if number >= end:
                raise KeyboardInterrupt
            copied.append(number)
            return copy_carried(carried, number, output, stem)

        copied.clear()
        with monkeypatch.context() as patch:
            patch.setattr(compact_module, "copy_carried", copy)
            patch.setattr(compact_module, "publish_manifest", _die)
            with pytest.raises(KeyboardInterrupt):
                compact(wanted)
        return copied

    assert attempt(end=2) == [0, 1]
    cut = new / sorted(expected)[2]  # of the second shard
    cut.write_bytes(cut.read_bytes()[:-1])
    assert attempt(end=3) == [1, 2]
    assert attempt() == [*range(3, total)]
    assert attempt() == []
    add_view(ViewRequest(str(old), "teacher", str(tmp_path / "student.json"), "own", run=QUIET))
    assert attempt() == [*range(total)]
    made = compact(wanted)
    assert shards_of(new) == expected
    assert [len(view.files) for view in made.views] == [total]
    assert validate_dataset(str(new)).findings == ()
    assert not list(new.glob(".vocag-*"))


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        pytest.param("edit.carried", "write_record", 2),
        pytest.param("edit.carried", "copy_view", 1, marks=pytest.mark.slow),
        pytest.param("edit.compact", "publish_manifest", 1, marks=pytest.mark.slow),
        pytest.param("edit.compact", "write_card", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_command_then_a_second_start(
    tmp_path: Path, module: str, function: str, call: int
) -> None:
    grow(tmp_path, "a", FIRST)
    other = str(tmp_path / "student.json")
    add_view(ViewRequest(str(tmp_path / "aligned"), "teacher", other, "own", run=QUIET))
    take_out(tmp_path, GONE)
    wanted = [str(tmp_path / "aligned"), "--output", str(tmp_path / "new"), "--quiet"]
    script = killed_at("beam_jobs.edit.compact", module, function, call=call)
    killed = subprocess.run([sys.executable, "-c", script, *wanted], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert list((tmp_path / "new").glob(".vocag-*"))
    assert main(wanted) == 0
    compact(CompactOptions(str(tmp_path / "aligned"), str(tmp_path / "never"), quiet=True))
    assert files_of(tmp_path / "new") == files_of(tmp_path / "never")


def test_what_can_not_be_compacted(tmp_path: Path) -> None:
    grow(tmp_path, "a", FIRST[:3])
    source = str(tmp_path / "aligned")
    with pytest.raises(OptionsError, match="lies in the dataset"):
        compact(CompactOptions(source, f"{source}/new"))
    with pytest.raises(OptionsError, match=r"holds no manifest\.json"):
        compact(CompactOptions(str(tmp_path / "in"), str(tmp_path / "new")))
    take_out(tmp_path, FIRST[:3])
    empty = compact(CompactOptions(source, str(tmp_path / "empty"), quiet=True))
    assert empty.totals["num_documents"] == 0
    assert validate_dataset(str(tmp_path / "empty")).findings == ()


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
