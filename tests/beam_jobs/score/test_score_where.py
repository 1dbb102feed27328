"""Scoring some documents only: what is stored is theirs, and rows that hold others are refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from beam_jobs.score.command import main
from beam_jobs.score.compare_command import main as compare
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import ScoreFiles, find_scores, list_scores
from pipeline.models.teacher_files import find_teacher
from pipeline.streaming import AlignedRows
from pipeline.validate.score_checks import check_scores
from schemas.errors import ForeignLossesError
from tests.pipeline.dataset.test_chosen_documents import METADATA, values
from tests.pipeline.dataset.test_document_scores import losses_of
from tests.support.datasets import build_dataset, make_texts, remove_documents
from tests.support.scored_data import (
    online_losses,
    run_score,
    score_arguments,
    stored_rows,
    write_world,
)
from tests.support.stored_scores import document_scores, write_scores

pytest.importorskip("duckdb")

WHERE = "good and year < 2030"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with metadata and a teacher, scored where documents are good and early."""
    root = tmp_path_factory.mktemp("world")
    write_world(root)
    build_dataset(root / "data", make_texts(40), metadata=METADATA, values=values)
    run_score(root, "--where", f" {WHERE} ")
    return root


def open_part(world: Path, where: str = WHERE, *, losses: str = "teacher") -> AlignedRows:
    return stored_rows(world / "data", where, losses=losses)


def part_scores(world: Path) -> ScoreFiles:
    return next(one for one in list_scores(str(world / "data")) if one.manifest.rule.where)


def test_what_the_library_refuses_is_named_by_options(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, and in the words of a worker that ends the job."""
    assert main(score_arguments(world, "--where", "yeer < 2030")) == 2
    assert capsys.readouterr().err.endswith("\nhint: --where 'year < 2030'\n")
    assert main(score_arguments(world, "--where", "good", "--device", "gpu")) == 1
    said = capsys.readouterr().err
    assert "the job failed: --device gpu: " in said
    assert said.endswith("\nhint: --device cpu\n")


def test_rows_of_the_part_hold_the_teachers_losses(world: Path) -> None:
    rows = open_part(world)
    batch = rows.__getitems__(range(len(rows)))
    stored, online = batch["teacher_losses"], online_losses(world / "teacher", batch)
    has_loss = batch.teacher_has_loss
    assert int(has_loss.sum()) > 500
    torch.testing.assert_close(stored[has_loss], online[has_loss], rtol=2**-10, atol=1e-4)
    assert len(open_part(world, f"{WHERE} and year < 2015")) < len(rows)


def test_only_the_part_is_scored_and_stored(world: Path) -> None:
    dataset, scores = open_dataset(world / "data"), part_scores(world)
    assert scores.manifest.rule.where == WHERE
    selection = select_documents(dataset, WHERE)
    wanted = list(selection.each(lambda index, kept: int(index.num_teacher_tokens[kept].sum())))
    assert [record.num_losses for record in scores.manifest.sidecars] == wanted
    assert 0 < sum(wanted) < 0.7 * dataset.manifest.totals["num_teacher_tokens"]


@pytest.mark.parametrize("where", ["", "good", "year < 2030"])
def test_rows_of_documents_that_were_not_scored_are_refused(world: Path, where: str) -> None:
    message = r"holds losses only where good and year < 2030, and these rows hold \d+ other doc"
    with pytest.raises(ForeignLossesError, match=message):
        open_part(world, where)


def test_a_document_without_losses_is_named_where_it_is_read(world: Path) -> None:
    rows = open_part(world)
    index, kept = select_documents(rows.dataset, WHERE).read(0)
    other = int(np.flatnonzero(~kept & (index.num_teacher_tokens > 0))[0])
    with pytest.raises(ForeignLossesError, match=rf"0 losses of document {other} of .*not scored"):
        rows.datasets[0]._teachers.read(other, 0, 1)


def test_a_missing_loss_is_a_finding(world: Path) -> None:
    dataset = open_dataset(world / "data")
    findings = check_scores(dataset, teacher=find_teacher(str(world / "teacher")))
    assert findings.found == []
    assert any("scored" in note and "again" in note for note in findings.notes)
    path = world / "data" / part_scores(world).manifest.sidecars[0].file
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    assert [finding.check for finding in check_scores(dataset, teacher=None).found]
    path.write_bytes(data)


def test_the_same_job_finds_itself_finished(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_score(world, "--where", WHERE)
    assert "is finished" in capsys.readouterr().out
    run_score(world, "--where", WHERE, "--dry-run")
    selection = select_documents(open_dataset(world / "data"), WHERE)
    kept = list(selection.each(lambda _, kept: kept.sum()))
    told = capsys.readouterr().out
    assert f"teacher tokens in {sum(kept)} documents" in told
    assert f"where           {WHERE}" in told
    assert f"tried           {sum(kept)} documents" in told


def test_scores_of_all_documents_stand_beside_those_of_a_part(world: Path) -> None:
    run_score(world)
    whole, part = find_scores("teacher", str(world / "data")), part_scores(world)
    assert whole.path != part.path
    assert find_scores("teacher", str(world / "data"), where=WHERE).path == part.path
    assert find_scores("teacher", str(world / "data"), where="good").path == whole.path
    of_part = open_part(world)
    assert of_part.teachers_rule.rules == (part.manifest.rule,)
    both, places = (of_part, open_part(world, losses=whole.path)), range(len(of_part))
    a, b = (rows.__getitems__(places)["teacher_losses"] for rows in both)
    torch.testing.assert_close(a, b, rtol=2**-10, atol=1e-4, equal_nan=True)
    assert compare([str(world / "data"), whole.path, part.path]) == 2
    assert check_scores(open_dataset(world / "data"), teacher=None).found == []


def test_losses_of_a_part_serve_a_later_generation(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "data", tmp_path / "data", ignore=shutil.ignore_patterns("plans"))
    dataset = open_dataset(tmp_path / "data")
    index, kept = select_documents(dataset, WHERE).read(0)
    longest = int(np.argmax(np.where(kept, index.num_teacher_tokens, 0)))
    before = len(open_part(tmp_path))
    name = dataset.read_index(0, with_names=True).document_id[longest]
    assert remove_documents(tmp_path / "data", name).generation == 1
    rows = open_part(tmp_path)
    assert len(rows) < before
    batch = rows.__getitems__(range(len(rows)))
    assert not torch.isnan(batch["teacher_losses"][batch.teacher_has_loss]).any()
    assert check_scores(open_dataset(tmp_path / "data"), teacher=None).found == []


def test_a_mixtures_datasets_are_scored_by_their_conditions(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_dataset(world / "more", make_texts(12, seed=3), metadata=METADATA, values=values)
    file = world / "mixture.toml"
    file.write_text(
        f'[datasets.data]\npath = "data"\nwhere = "{WHERE}"\n[datasets.more]\npath = "more"\n'
        "[[stages]]\nweights = { data = 0.5, more = 0.5 }\n"
    )
    arguments = score_arguments(world)[1:]
    assert main([str(file), *arguments, "--where", "good"]) == 2
    assert 'give its datasets a "where" there' in capsys.readouterr().err
    assert main([str(file), *arguments]) == 0
    batch = stored_rows(file).__getitems__(range(12))
    assert set(batch["source"].tolist()) == {0, 1}
    assert not torch.isnan(batch["teacher_losses"][batch.teacher_has_loss]).any()


def test_one_teacher_scores_what_another_chose(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = shutil.ignore_patterns("plans", "*teacher-*")
    shutil.copytree(world, tmp_path / "part", ignore=ignored)
    root, where = tmp_path / "part", "cheap.rank <= 0.5 and good"
    cheap = write_scores(root / "data", "org/cheap", losses_of(6))
    run_score(root, "--where", where)
    (dear,) = [one for one in list_scores(str(root / "data")) if one.manifest.rule.where]
    assert dear.manifest.rule.where == f'"{cheap.rule.fingerprint[:16]}".rank <= 0.5 and good'
    found = {name: own["rank"] or 0 for name, own in document_scores(root / "data", cheap).items()}
    right = {name for name, rank in found.items() if rank <= 0.5 and int(name[6:]) % 2 == 0}
    scored = document_scores(root / "data", dear.manifest)
    assert {name for name, own in scored.items() if own["bits_per_byte"] is not None} == right
    rows = stored_rows(root / "data", where)
    batch = rows.__getitems__(range(len(rows)))
    assert not torch.isnan(batch["teacher_losses"][batch.teacher_has_loss]).any()
    assert check_scores(open_dataset(root / "data"), teacher=None).found == []
    run_score(root, "--where", where)
    assert "is finished" in capsys.readouterr().out
