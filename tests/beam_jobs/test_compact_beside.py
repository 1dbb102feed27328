"""What stands beside shards comes along when they are compacted: as if it was made afterwards."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs.edit.compact import CompactOptions, compact, main
from beam_jobs.edit.losses import Scores, say_other_length
from beam_jobs.edit.remove import RemoveOptions, remove
from beam_jobs.views.command import add_view
from beam_jobs.views.options import ViewRequest
from pipeline.dataset.files import open_dataset
from pipeline.scoring.stored_losses import ScoreFiles, list_scores
from pipeline.streaming import StreamConfig, open_rows
from pipeline.tokenization import Tokenizer
from pipeline.validate.dataset import validate_dataset
from schemas.errors import DatasetError
from schemas.manifest import MANIFEST_FILE, Manifest, decode_manifest
from schemas.sidecar import decode_sidecar
from tests.beam_jobs.test_score_views import write_viewed_world
from tests.beam_jobs.test_views import files_of
from tests.pipeline.dataset.test_selection import METADATA, values
from tests.support.datasets import build_dataset, byte_level, make_texts
from tests.support.growing import QUIET, grow, take_out
from tests.support.hf_folders import write_model
from tests.support.scored_data import SEQ_LENGTH, run_score, write_world
from tests.support.views import add, write_dataset

ROWS = ("--teacher-seq-length", "64")
"""Stated: by default it follows from the shards, of which compacting makes others."""


def remove_from(folder: Path, shards: Sequence[int], *, step: int = 3) -> set[str]:
    """Remove every third document of some shards, the first one of each among them."""
    dataset = open_dataset(folder)
    ids = {n for shard in shards for n in dataset.read_ids(shard).to_pylist()[::step]}
    listing = folder.parent / "ids.txt"
    listing.write_text("\n".join(sorted(ids)), "utf-8")
    remove(RemoveOptions(str(folder), str(listing), quiet=True))
    return ids


def compacted(folder: Path, new: Path) -> Manifest:
    return compact(CompactOptions(str(folder), str(new), quiet=True))


def losses_by_id(folder: Path, scores: ScoreFiles, view: str = "") -> dict[str, bytes]:
    """Return the stored losses of each document of some scores."""
    dataset = open_dataset(folder, view=view)
    found: dict[str, bytes] = {}
    for shard, record in enumerate(scores.manifest.sidecars):
        stored = decode_sidecar((folder / record.file).read_bytes(), where=record.file)
        for place, name in enumerate(dataset.read_ids(shard).to_pylist()):
            start, stop = stored.starts[place : place + 2]
            found[name] = stored.losses[start:stop].tobytes()
    return found


def refuse_some(monkeypatch: pytest.MonkeyPatch, prefixes: tuple[bytes, ...]) -> None:
    """Let every tokenizer fail on texts that begin so."""
    tokenize = Tokenizer.tokenize_batch

    def fail(tokenizer: Tokenizer, texts: Sequence[bytes]) -> object:
        refused = [place for place, text in enumerate(texts) if text.startswith(prefixes)]
        return replace(tokenize(tokenizer, texts), failures=dict.fromkeys(refused, "refused"))

    monkeypatch.setattr(Tokenizer, "tokenize_batch", fail)
    monkeypatch.setattr(Tokenizer, "check_fast_path", lambda *_: None)


def test_views_are_those_that_are_made_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte; with documents that the view's tokenizer refuses, of which one is removed."""
    data, plain = tmp_path / "data", tmp_path / "plain"
    write_dataset(data, num_documents=40)
    shutil.copytree(data, plain)
    first = open_dataset(data).read_ids(0).to_pylist()
    second = open_dataset(data).read_ids(1).to_pylist()
    refused = (first[0], second[1])  # one that is removed, one that stays
    refuse_some(monkeypatch, tuple(f"{name.split('-')[2]}. ".encode() for name in refused))
    kinds: Any = (("qwen_like", "teacher", "q"), ("word_pieces", "student", "w"))
    for tokenizer, side, name in kinds:
        add(data, tokenizer, side=side, name=name)
    assert sum(f.num_left_out for v in open_dataset(data).manifest.views for f in v.files) == 4
    remove_from(data, (0, 1))
    remove_from(plain, (0, 1))
    before, after = tmp_path / "before", tmp_path / "after"
    compacted(data, before)
    compacted(plain, after)
    for tokenizer, side, name in kinds:
        add(after, tokenizer, side=side, name=name)
    found, wanted = files_of(before), files_of(after)
    found.pop(MANIFEST_FILE), wanted.pop(MANIFEST_FILE)
    assert found == wanted
    made, expected = (open_dataset(folder).manifest for folder in (before, after))
    assert made.fingerprint == expected.fingerprint
    for own, other in zip(made.views, expected.views, strict=True):
        assert replace(own, statistics={}) == replace(other, statistics={})
        assert own.statistics.keys() == other.statistics.keys()
        for name, value in other.statistics.items():
            assert own.statistics[name] == pytest.approx(value), name
    assert sum(f.num_left_out for v in made.views for f in v.files) == 2
    assert validate_dataset(str(before)).findings == ()
    old = {record.sha256 for record in open_dataset(data).manifest.views[0].files}
    assert [record.sha256 in old for record in made.views[0].files] == [False, False, True]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset scored in rows, in windows and in part, some of it removed, and compacted."""
    pytest.importorskip("duckdb")
    root = tmp_path_factory.mktemp("world")
    write_world(root)
    build_dataset(root / "data", make_texts(40), metadata=METADATA, values=values)
    run_score(root, *ROWS)
    run_score(root, "--stride", "16", "--teacher-seq-length", "48", seq_length=None)
    run_score(root, *ROWS, "--where", "good and year < 2030")
    gone = remove_from(root / "data", (0, 1))
    assert len(gone) > 4
    compacted(root / "data", root / "new")
    return root


def test_losses_are_those_that_were_stored(world: Path) -> None:
    old, new = list_scores(str(world / "data")), list_scores(str(world / "new"))
    assert len(new) == 3
    assert [s.manifest.rule for s in old] == [s.manifest.rule for s in new]
    manifest = open_dataset(world / "new").manifest
    for before, after in zip(old, new, strict=True):
        assert after.manifest.dataset == manifest.fingerprint
        stored = losses_by_id(world / "data", before)
        found = losses_by_id(world / "new", after)
        assert 20 < len(found) < len(stored)
        assert found == {name: stored[name] for name in found}
        whole = [record.sha256 == last.sha256 for record, last in
                 zip(before.manifest.sidecars, after.manifest.sidecars, strict=True)]  # fmt: skip
        assert whole == [False, False, True]
        part = bool(after.manifest.rule.where)
        assert any(not each for each in found.values()) == part


def test_scores_are_what_scoring_again_gives(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts, contexts and splits to the digit; losses but for their last bits."""
    for name in ("teacher", "student"):
        (tmp_path / name).symlink_to(world / name)
    shutil.copytree(world / "new", tmp_path / "data", ignore=shutil.ignore_patterns("*teacher-*"))
    assert list_scores(str(tmp_path / "data")) == []
    run_score(tmp_path, *ROWS)
    run_score(tmp_path, "--stride", "16", "--teacher-seq-length", "48", seq_length=None)
    run_score(tmp_path, *ROWS, "--where", "good and year < 2030")
    again, carried = list_scores(str(tmp_path / "data")), list_scores(str(world / "new"))
    split = 0
    for fresh, own in zip(again, carried, strict=True):
        assert fresh.manifest.rule == own.manifest.rule
        assert fresh.manifest.dataset == own.manifest.dataset
        for made, record in zip(fresh.manifest.sidecars, own.manifest.sidecars, strict=True):
            same: dict[str, Any] = {"sha256": "", "loss_sum": 0.0}
            assert replace(made, **same) == replace(record, **same)
            assert made.loss_sum == pytest.approx(record.loss_sum, rel=1e-3)
            split += record.num_split_documents
        stored = losses_by_id(world / "new", own)
        for name, data in losses_by_id(tmp_path / "data", fresh).items():
            a, b = np.frombuffer(data, np.float16), np.frombuffer(stored[name], np.float16)
            np.testing.assert_allclose(a, b, rtol=2**-9, atol=1e-3)
    assert split > 5
    capsys.readouterr()
    (tmp_path / "data").rename(tmp_path / "fresh")
    (tmp_path / "data").symlink_to(world / "new")
    run_score(tmp_path, *ROWS)
    assert "is finished" in capsys.readouterr().out


def test_readers_and_validate_take_them(world: Path) -> None:
    report = validate_dataset(str(world / "new"), teacher=str(world / "teacher"))
    assert report.findings == ()
    of_rows = [
        s for s in list_scores(str(world / "new")) if s.manifest.rule.context["stride"] is None
    ]
    assert len(of_rows) == 2
    for scores in of_rows:
        where = scores.manifest.rule.where
        config = StreamConfig(
            path=str(world / "new"),
            seq_length=SEQ_LENGTH,
            teacher_seq_length=64,
            stored_losses=scores.path,
            where=where,
        )
        rows = open_rows(config)
        batch = rows.__getitems__(range(len(rows)))
        assert not np.isnan(batch["teacher_losses"][batch.teacher_has_loss].numpy()).any()


def test_losses_through_a_view_come_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_viewed_world(tmp_path, "teacher")
    run_score(tmp_path, "--view", "other", *ROWS)
    (before,) = list_scores(str(tmp_path / "data"))
    remove_from(tmp_path / "data", (1,))
    assert main([str(tmp_path / "data"), "--output", str(tmp_path / "new")]) == 0
    told = capsys.readouterr().out
    assert f"carried over: view other, losses of {Path(before.path).name}\n" in told
    (after,) = list_scores(str(tmp_path / "new"))
    assert (
        after.manifest.dataset == open_dataset(tmp_path / "new", view="other").manifest.fingerprint
    )
    stored = losses_by_id(tmp_path / "data", before, "other")
    found = losses_by_id(tmp_path / "new", after, "other")
    assert found == {name: stored[name] for name in found}
    assert validate_dataset(str(tmp_path / "new")).findings == ()
    (tmp_path / "data").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "data")
    run_score(tmp_path, "--view", "other", *ROWS)
    assert "is finished" in capsys.readouterr().out


def test_what_is_there_in_part_comes_along_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dataset that has grown since; and what a killed run has left, which nothing lists."""
    grow(tmp_path, "a", [f"a{number}" for number in range(30)])
    aligned, model = tmp_path / "aligned", tmp_path / "teacher"
    (tmp_path / "data").symlink_to(aligned)
    own = ViewRequest(str(aligned), "teacher", str(tmp_path / "student.json"), "own", run=QUIET)
    add_view(own)
    write_model(model, byte_level(340), seed=1)
    run_score(tmp_path, *ROWS)
    num_old = len(open_dataset(aligned).manifest.shards)
    grow(tmp_path, "b", [f"b{number}" for number in range(10)], repeat=9)
    take_out(tmp_path, ["a3", "b3"])
    (sidecar,) = list(aligned.glob("*-000000-of-*.teacher-*.safetensors"))[:1]
    left = sidecar.name.replace(".teacher-", ".teacher-0")[:-13] + ".safetensors"
    shutil.copy(sidecar, aligned / left)
    capsys.readouterr()
    assert main([str(aligned), "--output", str(tmp_path / "new")]) == 0
    told = capsys.readouterr().out
    total = len(open_dataset(tmp_path / "new").manifest.shards)
    assert 0 < num_old < total
    assert f"not copied: 1 sidecar that no score manifest lists, such as {left}: vocag" in told
    of = f"of {num_old} of {total} shards; vocag"
    assert f"copied as far as it is there: view own, {of} add-teacher on the new" in told
    assert f"{of} score on the new dataset does the rest" in told
    assert list_scores(str(tmp_path / "new")) == []
    assert not list((tmp_path / "new").glob(left))
    assert validate_dataset(str(tmp_path / "new")).findings == ()
    add_view(replace(own, output=str(tmp_path / "new")))
    (tmp_path / "data").unlink()
    (tmp_path / "data").symlink_to(tmp_path / "new")
    run_score(tmp_path, *ROWS)
    assert f"{num_old} shards were taken over" in capsys.readouterr().out
    assert validate_dataset(str(tmp_path / "new")).findings == ()
    assert len(open_dataset(tmp_path / "new", view="own").manifest.shards) == total


@pytest.mark.parametrize("shard", [0, 2])  # one that is rewritten, one that is copied
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("*.view-own.bin", "is not the view's file that the manifest names"),
        ("*.view-own.parquet", "is not the view's index that the manifest names"),
        ("*.teacher-*.safetensors", "is not the sidecar that its score manifest names"),
    ],
)
def test_damage_is_found(
    scored_and_viewed: Path, tmp_path: Path, kind: str, message: str, shard: int
) -> None:
    shutil.copytree(scored_and_viewed, tmp_path / "data")
    path = sorted((tmp_path / "data").glob(kind))[shard]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=message):
        compacted(tmp_path / "data", tmp_path / "new")
    assert not (tmp_path / "new" / MANIFEST_FILE).exists()
    path.unlink()
    with pytest.raises(DatasetError, match="is missing: "):
        compacted(tmp_path / "data", tmp_path / "new")


def test_a_score_manifest_that_is_cut_is_refused(scored_and_viewed: Path, tmp_path: Path) -> None:
    shutil.copytree(scored_and_viewed, tmp_path / "data")
    (path,) = (tmp_path / "data").glob("teacher-*.json")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetError, match="is no complete score manifest"):
        compacted(tmp_path / "data", tmp_path / "new")


def test_losses_of_another_dataset_stay_behind(
    scored_and_viewed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(scored_and_viewed, tmp_path / "data")
    (path,) = (tmp_path / "data").glob("teacher-*.json")
    own = decode_manifest((tmp_path / "data" / MANIFEST_FILE).read_bytes())
    first = own.generations[0].fingerprint
    path.write_text(path.read_text().replace(first, "0" * 64))
    assert main([str(tmp_path / "data"), "--output", str(tmp_path / "new")]) == 0
    told = capsys.readouterr().out
    assert f"not copied: losses of {path.name}: " in told
    assert "was made for dataset 0000000000000000…" in told
    assert list_scores(str(tmp_path / "new")) == []


def test_a_default_length_that_changes_is_told(world: Path) -> None:
    dataset = open_dataset(world / "data")
    files = next(
        s for s in list_scores(str(world / "data")) if s.manifest.rule.context["stride"] is None
    )
    rule = files.manifest.rule
    long = {**rule.context, "seq_length": 512, "teacher_seq_length": 512}
    share = (
        dataset.manifest.totals["num_teacher_tokens"]
        / dataset.manifest.totals["num_student_tokens"]
    )
    long["teacher_seq_length"] = -int(-512 * share * 1.125 // 64) * 64
    scores = Scores(
        replace(files, manifest=replace(files.manifest, rule=replace(rule, context=long))), dataset
    )
    assert say_other_length(scores, dataset.manifest) == ""
    shards = [
        replace(s, num_teacher_tokens=2 * s.num_teacher_tokens) for s in dataset.manifest.shards
    ]
    told = say_other_length(scores, replace(dataset.manifest, shards=tuple(shards)))
    assert f"of rows of {long['teacher_seq_length']} teacher tokens, and the new" in told
    assert f"give --teacher-seq-length {long['teacher_seq_length']}\n" in told


@pytest.fixture(scope="module")
def scored_and_viewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three shards with a view and scores; of the first one, documents are removed."""
    root = tmp_path_factory.mktemp("beside")
    write_world(root)
    (root / "own.json").write_bytes((root / "data/tokenizers/student/tokenizer.json").read_bytes())
    add_view(ViewRequest(str(root / "data"), "teacher", str(root / "own.json"), "own", run=QUIET))
    run_score(root, *ROWS)
    remove_from(root / "data", (0,))
    return root / "data"
