"""Scores that don't fit are refused before a teacher is loaded; a dry run tells what they take."""

from pathlib import Path

import pytest

from beam_jobs import shortages
from beam_jobs.score.command import main
from beam_jobs.score.disk import estimate_disk
from pipeline.dataset.files import open_dataset
from schemas.sidecar import decode_score_manifest
from tests.support.scored_data import run_score, score_arguments, sidecars, write_world


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return write_world(tmp_path)


def test_the_estimate_is_that_of_the_files_less_those_that_are_there(world: Path) -> None:
    folder = str(world / "data")
    manifest = open_dataset(folder).manifest
    whole = estimate_disk(folder, manifest, "0" * 64)
    run_score(world)
    written = sum(len(data) for data in sidecars(world).values())
    assert abs(whole - written) < 100 * len(manifest.shards)
    (path,) = (world / "data").glob("teacher-*.json")
    scores = decode_score_manifest(path.read_bytes(), where="")
    assert estimate_disk(folder, manifest, scores.rule.fingerprint) == 0
    (world / "data" / scores.sidecars[0].file).unlink()
    one = estimate_disk(folder, manifest, scores.rule.fingerprint)
    assert 0 <= one - scores.sidecars[0].num_bytes < 1000
    assert 0 < one < whole / 2


def test_a_full_disk_is_found_out_before_the_lock_is_taken(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shortages, "free_bytes", lambda folder: 1000)
    assert main(score_arguments(world)) == 2
    message = capsys.readouterr().err
    assert "has 1.00 kB of free disk, and the job will need about" in message
    assert not list((world / "data").glob(".vocag-*"))


def test_a_dry_run_tells_and_writes_nothing(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in (world / "data").iterdir())
    assert main(score_arguments(world, "--dry-run")) == 0
    shown = capsys.readouterr().out
    assert "dry run: nothing was written" in shown
    assert "3 shards" in shown
    assert "0 sidecars there" in shown
    assert " are free at " in shown
    assert sorted(path.name for path in (world / "data").iterdir()) == before
