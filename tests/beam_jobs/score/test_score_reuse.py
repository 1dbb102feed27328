"""`score --reuse`: losses follow the text, and nothing that the teacher would see otherwise."""

import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from beam_jobs.align.command import align
from beam_jobs.align.options import AlignOptions
from beam_jobs.running.run_options import RunOptions
from beam_jobs.score import reuse as reusing
from beam_jobs.score.command import main
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import list_scores
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.transformers import Scorer
from pipeline.scoring.reusable_losses import ScoredShard
from pipeline.scoring.sidecars import ShardToScore
from schemas.errors import DamagedShardError
from schemas.sidecar import decode_sidecar
from tests.support.datasets import build_dataset, byte_level, make_texts, remove_documents
from tests.support.hf_folders import write_model
from tests.support.scored_data import retrain, run_score, score_arguments

TEXTS = make_texts(16) + [(f"short-{n}", f"{n} is a short text.") for n in range(8)]
ALONE = ("--batch-tokens", "1")
"""A piece is a batch: no loss depends on what is scored next to it."""


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scored")
    build_dataset(root / "data", TEXTS)
    write_model(root / "teacher", byte_level(480), seed=1)
    run_score(root, *ALONE)
    return root


@pytest.fixture
def old(scored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(scored, tmp_path / "world")


def reuse(root: Path, new: Path, *more: str, old: str = "data") -> None:
    arguments = score_arguments(root, *more, "--reuse", old if "://" in old else str(root / old))
    assert main([str(new), *arguments[1:]]) == 0


def told(capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """Return how many documents the summary says were reused, and computed."""
    shown = capsys.readouterr().out
    ((reused, computed),) = re.findall(r"reused +(\d+) documents?, the other (\d+) comp", shown)
    return int(reused), int(computed)


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*teacher-*"))}


def seen(folder: Path) -> Counter[tuple[Any, ...]]:
    """Return what the teacher sees of each document, and the losses it has, in plain values."""
    dataset, found = open_dataset(folder), Counter[tuple[Any, ...]]()
    (scores,) = list_scores(str(folder))
    rule = ContextRule.from_json(scores.manifest.rule.context)
    for number, record in enumerate(scores.manifest.sidecars):
        shard = ShardToScore.open(select_documents(dataset), number, rule)
        tokens = shard.read_tokens()
        losses = decode_sidecar((folder / record.file).read_bytes(), at="").losses
        for document, (start, stop) in enumerate(pairwise(tokens.starts)):
            own = shard.pieces.of_documents(np.arange(len(shard.index)) == document)
            cuts = (own.start.tolist(), own.stop.tolist(), own.continues.tolist())
            ids = tuple(tokens.input_ids[start:stop].tolist())
            found[ids, str(cuts), losses[start:stop].tobytes()] += 1
    return found


def test_another_student_costs_only_what_is_new(
    old: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [(f"renamed-{name}", text) for name, text in TEXTS] + make_texts(5, seed=9)
    for name in ("fresh", "new"):
        build_dataset(old / name, texts, num_shards=2, student=byte_level(300), name="other")
    arguments = score_arguments(old, *ALONE)
    assert main([str(old / "fresh"), *arguments[1:]]) == 0
    asked: list[int] = []
    original = Scorer.score

    def count(self: Scorer, tokens: Any, pieces: Any, **more: Any) -> Any:
        asked.append(len(np.unique(pieces.document)))
        return original(self, tokens, pieces, **more)

    monkeypatch.setattr(Scorer, "score", count)
    capsys.readouterr()
    reuse(old, old / "new", *ALONE)
    same = (seen(old / "data") & seen(old / "new")).total()
    assert told(capsys) == (same, 29 - same)
    assert sum(asked) == 29 - same
    assert 7 < same < 24, "longer documents are cut elsewhere by this student"
    assert stored(old / "new") == stored(old / "fresh")
    assert len(stored(old / "new")) == 2 * 2 + 1
    assert not list((old / "new").glob(".vocag-*"))


def test_reused_losses_are_the_old_bytes_in_batches_too(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [*TEXTS, *make_texts(8, seed=9)]
    for name in ("fresh", "new"):
        build_dataset(old / name, texts, num_shards=1)
    assert main([str(old / "fresh"), *score_arguments(old)[1:]]) == 0
    capsys.readouterr()
    reuse(old, old / "new")
    assert told(capsys) == (24, 8)
    assert seen(old / "data") <= seen(old / "new")
    losses = []
    for folder in ("fresh", "new"):
        (path,) = (old / folder).glob("*.safetensors")
        losses.append(decode_sidecar(path.read_bytes(), at="").losses)
    np.testing.assert_allclose(*losses, rtol=2**-10, atol=1e-4)


def test_a_dataset_written_anew_costs_no_teacher_pass(
    old: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher isn't even loaded."""
    remove_documents(old / "data", TEXTS[3][0])
    new = old / "new"
    given = (str(old / "data"),)
    align(AlignOptions(input=given, output=str(new), run=RunOptions(quiet=True)))
    monkeypatch.setattr("pipeline.scoring.engines.transformers.load_scorer", None)
    capsys.readouterr()
    reuse(old, new)
    assert told(capsys) == (23, 0)
    assert not seen(new) - seen(old / "data")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("--dtype", "bfloat16"), "dtype is 'float32' there and 'bfloat16' here"),
        (("weights",), r"weights_sha256 is '\w+' there and '\w+' here"),
        (("--teacher-context", "none"), ""),
    ],
)
def test_another_teacher_dtype_or_context_is_not_reused(
    old: Path, change: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build_dataset(old / "new", TEXTS)
    if change == ("weights",):
        retrain(old / "teacher")
        change = ()
    reuse(old, old / "new", *change)
    shown = capsys.readouterr().out
    assert re.search(r"reused +0 documents, the other 24 computed", shown)
    assert bool(reason) == ("nothing can be taken over" in shown)
    assert re.search(reason, shown)


def test_a_short_document_is_the_same_in_longer_rows(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    for name in ("part", "new", "longer"):
        build_dataset(old / name, TEXTS)
    arguments = score_arguments(old, "--reuse", str(old / "data"), seq_length=256)[1:]
    assert main([str(old / "longer"), *arguments]) == 0
    reused, computed = told(capsys)
    assert reused == (seen(old / "data") & seen(old / "longer")).total()
    assert reused > 3 < computed
    part = score_arguments(old, "--where", "num_text_bytes < 200")
    assert main([str(old / "part"), *part[1:]]) == 0
    capsys.readouterr()
    reuse(old, old / "new", old="part")
    short = sum(len(text.encode()) < 200 for _, text in TEXTS)
    assert 0 < short < 24
    assert told(capsys) == (short, 24 - short)


def test_a_store_serves_too(
    old: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(old / "home"))
    fsspec.filesystem("memory").put(str(old / "data"), "/reused", recursive=True)
    build_dataset(old / "new", TEXTS)
    reuse(old, old / "new", *ALONE, old="memory://reused")
    assert told(capsys) == (24, 0)
    for path in (old / "data").glob("*.safetensors"):
        assert (old / "new" / path.name).read_bytes() == path.read_bytes()


def test_datasets_without_scores(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plain", "new"):
        build_dataset(old / name, TEXTS)
    reuse(old, old / "new", old="plain")
    shown = capsys.readouterr().out
    assert "plain: nothing can be taken over: no teacher has scored it to its end" in shown
    assert main([*score_arguments(old), "--reuse", str(old / "none")]) == 0, "finished already"
    build_dataset(old / "third", TEXTS)
    arguments = score_arguments(old, "--reuse", str(old / "none"))
    assert main([str(old / "third"), *arguments[1:]]) == 2
    assert "manifest.json does not exist" in capsys.readouterr().err


def test_a_resumed_job_lists_once_and_altered_losses_stop_it(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scores,) = list_scores(str(old / "data"))
    rule, quiet = scores.manifest.rule, RunOptions(quiet=True)
    folder = old / "run"
    folder.mkdir()
    shards = reusing.find_reusable((str(old / "data"),), rule, quiet)
    reusing.save_reusable(shards, str(folder), quiet)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(ScoredShard, "list_documents", None)  # raises where it is called
    reusing.save_reusable(shards, str(folder), quiet)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    context = ContextRule.from_json(rule.context)
    shard = ShardToScore.open(select_documents(open_dataset(old / "data")), 0, context)
    tokens = shard.read_tokens()

    def read() -> Any:
        known = reusing.open_reusable(str(folder))
        found = known.find(tokens, shard.pieces, context)
        assert (found >= 0).all()
        return known.read(found, tokens.starts)

    assert not np.isnan(read()).any()
    path = old / "data" / scores.manifest.sidecars[0].file
    data = path.read_bytes()
    for content in (data[:-2] + bytes(2), data[:-2], b""):
        path.write_bytes(content)
        with pytest.raises(DamagedShardError, match="is not the sidecar that its score manifest"):
            read()
    path.unlink()
    with pytest.raises(DamagedShardError, match="is missing"):
        read()
