"""The score job: the same sidecars whatever happens, and errors that say what to do."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load

from beam_jobs import shortages
from beam_jobs.job_errors import JobError
from beam_jobs.running.exits import RESUME
from beam_jobs.running.runners import run_pipeline
from beam_jobs.score import summary
from beam_jobs.score.command import main
from beam_jobs.score.summary import estimate_disk
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.score_files import list_scores
from pipeline.models.teacher_files import find_teacher
from pipeline.scoring.sidecars import ShardToScore
from pipeline.validate.score_checks import check_scores
from schemas.document_score_table import document_scores_name
from schemas.errors import ForeignLossesError
from schemas.manifest import MANIFEST_FILE
from schemas.sidecar import decode_sidecar
from tests.support.datasets import build_dataset, flip, make_texts, remove_documents, seen_ids
from tests.support.killing import run_killed
from tests.support.scored_data import (
    online_losses,
    read_sidecars,
    retrain,
    run_score,
    score_arguments,
    scores_of,
    sidecars,
    stored_rows,
)


def test_a_teacher_scores_one_generation_at_a_time(
    unscored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wrote the same sidecars, and the older job's manifest came last."""
    statuses = []

    def remove_meanwhile(*_: object, **__: object) -> None:
        remove_documents(unscored / "data", min(seen_ids(unscored / "data")))
        statuses.append(main(score_arguments(unscored)))
        raise JobError("enough")

    monkeypatch.setattr("beam_jobs.score.job.run_pipeline", remove_meanwhile)
    assert main(score_arguments(unscored)) == 1
    assert statuses == [2]
    assert "writes to" in capsys.readouterr().err
    assert not list((unscored / "data").glob(".vocag-*.lock"))


def test_a_job_that_waited_leaves_the_scores_of_a_later_generation(
    unscored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had read the dataset before, hashed its teacher for minutes, and wrote last."""
    ran = []

    def score_meanwhile(*_: object, **__: object) -> None:
        monkeypatch.undo()
        remove_documents(unscored / "data", min(seen_ids(unscored / "data")))
        run_score(unscored)
        ran.append(sidecars(unscored))

    monkeypatch.setattr("beam_jobs.score.job.require_disk", score_meanwhile)
    assert main(score_arguments(unscored)) == 2
    assert "scored generation 1 of" in capsys.readouterr().err
    assert sidecars(unscored) == ran[0]
    run_score(unscored)
    assert sidecars(unscored) == ran[0]


def test_workers_read_the_generation_that_the_job_started_with(
    unscored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(str(unscored / "data"))

    def remove_first(*arguments: Any, **options: Any) -> None:
        remove_documents(unscored / "data", min(seen_ids(unscored / "data")))
        run_pipeline(*arguments, **options)

    monkeypatch.setattr("beam_jobs.score.job.run_pipeline", remove_first)
    assert main(score_arguments(unscored)) == 0
    (scores,) = list_scores(str(unscored / "data"))
    assert scores.manifest.dataset == dataset.manifest.fingerprint
    assert not list((unscored / "data").glob(".vocag-*"))


def test_a_run_leaves_a_sidecar_per_shard_and_nothing_else(
    unscored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in (unscored / "data").glob("*") if path.is_file()}
    run_score(unscored)
    shown = capsys.readouterr().out
    assert re.search(r"scored 40 documents in .*: .* teacher tokens/s", shown)
    assert re.search(r"\d+ documents split\n .* 3, .* bytes a teacher token\n", shown)
    assert re.search(r"padding +[0-4]\.\d+ %\n", shown)
    scores = scores_of(unscored)
    for record in scores.sidecars:
        data = (unscored / "data" / record.file).read_bytes()
        losses = decode_sidecar(data, at=record.file)
        tar = (unscored / "data" / record.shard).read_bytes()
        assert (len(data), sha256(data).hexdigest()) == (record.num_bytes, record.sha256)
        assert losses.teacher == scores.rule.fingerprint
        assert losses.shard_sha256 == sha256(tar).hexdigest()
        assert len(losses.losses) == losses.starts[-1] == record.num_tokens == record.num_losses
        assert np.isclose(record.loss_sum, losses.losses.astype(float).sum())
        np.testing.assert_array_equal(load(data)["losses"], losses.losses)
    assert {path: path.read_bytes() for path in before} == before
    new = {path.name for path in (unscored / "data").iterdir()} - {path.name for path in before}
    manifest = f"teacher-{scores.rule.fingerprint[:16]}.json"
    tables = {document_scores_name(record.file) for record in scores.sidecars}
    assert new == {record.file for record in scores.sidecars} | tables | {manifest, "tokenizers"}
    written = sidecars(unscored)
    monkeypatch.setattr("beam_jobs.score.steps.score_shard", None)  # raises where it is called
    run_score(unscored)
    assert "is finished: the same teacher, rule and data made it" in capsys.readouterr().out
    assert sidecars(unscored) == written
    # Without tables: they come from the losses, no teacher runs.
    for name in sorted(tables)[1:]:
        (unscored / "data" / name).unlink()
    findings = check_scores(open_dataset(unscored / "data"), teacher=None)
    (note,) = findings.notes
    assert note.startswith(f"{len(tables) - 1} tables of documents' scores")
    assert not findings.found
    run_score(unscored)
    assert f"{len(tables) - 1} tables of documents' scores made" in capsys.readouterr().out
    assert sidecars(unscored) == written
    named = sorted(scores.sidecars, key=lambda record: record.file)
    (data,) = pq.read_table(unscored / "data" / min(tables)).to_batches()
    dearer = pc.add(data.column(2), pa.scalar(1e-3, pa.float32()))
    other = data.set_column(2, data.schema.field(2), dearer)
    pq.write_table(pa.Table.from_batches([other]), unscored / "data" / min(tables))
    (finding,) = check_scores(open_dataset(unscored / "data"), teacher=None).found
    assert ": its SHA-256 isn't the one in " in finding.message
    path, digests = unscored / "data" / manifest, [record.documents_sha256 for record in named]
    altered = sha256((unscored / "data" / min(tables)).read_bytes()).hexdigest()
    path.write_text(path.read_text().replace(str(digests[0]), altered))
    (finding,) = check_scores(open_dataset(unscored / "data"), teacher=None).found
    assert ": bits_per_byte don't follow from the losses" in finding.message


def test_the_estimate_of_disk_is_of_missing_files(
    unscored: Path, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores, shards = scores_of(world), open_dataset(world / "data").manifest.shards
    whole = estimate_disk(str(unscored / "data"), shards, scores.rule)
    written = sum(len(data) for data in sidecars(world).values())
    assert abs(whole - written) < 100 * len(shards)
    assert estimate_disk(str(world / "data"), shards, scores.rule) == 0
    before = sorted(path.name for path in (unscored / "data").iterdir())
    monkeypatch.setattr(shortages, "free_bytes", lambda folder: 1000)
    assert main(score_arguments(unscored)) == 2
    assert "has 1.00 kB of free disk, and the job will need about" in capsys.readouterr().err
    assert sorted(path.name for path in (unscored / "data").iterdir()) == before


def test_a_few_documents_say_what_all_would_take(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in (world / "data").iterdir())
    monkeypatch.setattr(summary, "TRIED_DOCUMENTS", 15)
    run_score(world, "--dry-run")
    shown = capsys.readouterr().out
    told = re.findall(r"tried +15 documents, .*, mean loss ([\d.]+) nats", shown)
    for part in ("nothing was written", "3 shards", "3 sidecars there", " are free at "):
        assert part in shown
    assert sorted(path.name for path in (world / "data").iterdir()) == before
    losses: list[np.ndarray] = []
    for sidecar in read_sidecars(world):
        losses += np.split(sidecar.losses.astype(float), sidecar.starts[1:-1])
    assert len(losses) == 40
    assert float(told[0]) == pytest.approx(np.nanmean(np.concatenate(losses[:15])), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("call", [3, 5])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    unscored: Path, world: Path, call: int
) -> None:
    reference = sidecars_but_paths(world)
    write = ["beam_jobs.score.steps._write"]
    run_killed("beam_jobs.score.command", score_arguments(unscored), write, call=call)
    left = sidecars(unscored)
    assert len(left) == call - 1, "sidecars, and the tables of their documents' scores"
    assert left.items() <= reference.items()
    run_score(unscored)
    assert sidecars_but_paths(unscored) == reference
    assert not list((unscored / "data").glob(".vocag-*"))


@pytest.mark.parametrize("ended", ["storage.read_bytes", "storage.remove_folder", "summarise"])
def test_a_job_killed_at_its_very_end_leaves_nothing_to_the_next(
    ended: str, unscored: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder, and a lock, stayed for ever: all scores are there, so nothing was done."""

    class KilledError(BaseException):
        """Ends the job at once, as SIGKILL would."""

    def dies(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("beam_jobs.score.job.hold_lock", lambda path, _: hold_by_file(path))
        patch.setattr(f"beam_jobs.score.job.{ended}", dies)
        with pytest.raises(KilledError):
            main(score_arguments(unscored))
    assert list((unscored / "data").glob(".vocag-*"))
    run_score(unscored)
    assert sidecars_but_paths(unscored) == sidecars_but_paths(world)
    assert not list((unscored / "data").glob(".vocag-*"))


def test_scores_of_a_grown_dataset_leave_no_folder_of_an_earlier_state(
    unscored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was killed before the dataset changed is never run again."""

    def dies(*_: object, **__: object) -> None:
        raise JobError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("beam_jobs.score.job.run_pipeline", dies)
        assert main(score_arguments(unscored)) == 1
    remove_documents(unscored / "data", min(seen_ids(unscored / "data")))
    assert list((unscored / "data").glob(".vocag-*"))
    run_score(unscored)
    assert not list((unscored / "data").glob(".vocag-*"))


@contextmanager
def hold_by_file(path: str) -> Iterator[None]:
    """Leave a lock's file, as a killed job does."""
    Path(path).touch()
    yield


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(unscored: Path, world: Path) -> None:
    run_score(unscored, "--workers", "2")
    assert sidecars_but_paths(unscored) == sidecars_but_paths(world)


def sidecars_but_paths(world: Path) -> dict[str, bytes]:
    """Return what scoring wrote; the score manifest names the teacher's folder."""
    return {name: data.replace(str(world).encode(), b"") for name, data in sidecars(world).items()}


def test_shards_that_an_earlier_run_has_scored_are_taken_over(
    copied: Path, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = copied.rename(copied.with_name("it's world"))
    reference = sidecars(copied)
    names = [name for name in reference if name.endswith(".safetensors")]
    manifest = next((copied / "data").glob("teacher-*.json"))
    manifest.unlink()
    cut, foreign = (copied / "data" / name for name in names[:2])
    cut.write_bytes(reference[names[0]][:-9])
    foreign.write_bytes(reference[names[2]])  # of another shard
    read: list[int] = []
    original = ShardToScore.read_tokens

    def note(shard: ShardToScore) -> Any:
        read.append(shard.number)
        return original(shard)

    monkeypatch.setattr(ShardToScore, "read_tokens", note)
    run_score(copied)
    assert sorted(read) == [0, 1]
    shown = capsys.readouterr().out
    assert "resumed         1 shard taken over" in shown
    assert split(shown.splitlines()[-1])[-1:] == [str(manifest)]
    assert sidecars_but_paths(copied) == sidecars_but_paths(world)


def test_teachers_and_rules_lie_side_by_side(copied: Path) -> None:
    retrain(copied / "teacher")
    run_score(copied)
    run_score(copied, "--dtype", "bfloat16", seq_length=128)
    found = [scores.manifest for scores in list_scores(str(copied / "data"))]
    assert sorted(scores.rule.dtype for scores in found) == ["bfloat16", "float32", "float32"]
    assert len({scores.sidecars[0].context_sha256 for scores in found}) == 2


@pytest.mark.parametrize("damage", ["teacher", "device", "document"])
def test_what_stops_the_job(
    unscored: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = score_arguments(unscored)
    if damage == "teacher":
        arguments.remove("--allow-untrained-teacher")
        message = r"mean loss on a plain English text is 6\..*chance is 6\.17: its weights did not"
        hint = "hint: --allow-untrained-teacher  # only to test or to measure speed"
    elif damage == "device":
        arguments += ["--device", "cuda:99"]
        message, hint = r"--device cuda:99: torch \S+ sees \d GPUs here", "hint: --device cpu"
    else:
        tar = sorted((unscored / "data").glob("*.tar"))[1]
        flip(tar, 5000)
        message = r"sample \w{32} in shard docs-000001-of-000003.tar has CRC-32"
        hint = ""
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert (RESUME in said, said.splitlines()[-1] == hint) == (not hint, bool(hint))
    assert not list((unscored / "data").glob("teacher-*.json"))


def test_what_can_t_be_scored_or_scored_with_is_refused(
    unscored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no config.json with \*.safetensors"):
        find_teacher(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"no such folder or .gguf file, and not a Hugging Face"):
        find_teacher("nowhere.gguf")
    for arguments, message in [
        ([str(tmp_path / "empty"), "--teacher", "t", "--seq-length", "64"], MANIFEST_FILE),
        (score_arguments(unscored, "--studnet=x"), "neither score nor Beam knows --studnet=x"),
        (
            score_arguments(unscored, "--teacher", str(unscored / "student")),
            "\nhint: --teacher tests/",
        ),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


TOP = ("--teacher", "t", "--top-k", "4")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "--teacher is required"),
        (("--teacher", "t", "--threads", "-1"), "--threads -1: it must be at least 0"),
        (("--engine", "openai"), "needs --endpoint, --model, --dtype and --quantization"),
        (("--model", "m", "--teacher", "t"), "--model needs --engine openai"),
        (("--teacher", "t", "--concurrency", "0"), "--concurrency 0: it must be at least 1"),
        (("--teacher", "t", "--answer-seconds", "0"), "--answer-seconds 0.0 is not a positive"),
        ((*TOP, "--top-k", "0"), "--top-k 0 is not between 1 and 255"),
        ((*TOP, "--top-k", "256"), "--top-k 256 is not between 1 and 255"),
        (("--teacher", "t", "--top-mass", "0.9"), "--top-mass and --top-log-probs need --top-k"),
        (("--teacher", "t", "--top-log-probs", "float16"), "--top-log-probs need --top-k"),
        ((*TOP, "--top-mass", "0"), "--top-mass 0.0 is not above 0 and at most 1"),
        ((*TOP, "--top-mass", "nan"), "--top-mass nan is not above 0 and at most 1"),
        (("--teacher", "t", "--draws", "4"), "--draws needs --top-k"),
        ((*TOP, "--draws", "-1"), "--draws -1 is not between 1 and 250"),
        ((*TOP, "--top-k", "250", "--draws", "5"), "--draws 5 is not between 1 and 4"),
        ((*TOP, "--draws", "0", "--draws-seed", "5"), "--draws-seed 5 needs --draws"),
        ((*TOP, "--top-mass", "0.9", "--draws-seed", "5"), "--draws-seed 5 needs --draws"),
        ((*TOP, "--draws", "3", "--draws-seed", "-5"), "--draws-seed -5 is not between 0 and"),
        ((*TOP, "--draws", "3", "--top-mass", "0.9"), "leave out --top-mass"),
        (("--teacher", "t", "--entropy-above", "1"), "--entropy-above needs --top-k"),
        ((*TOP, "--entropy-above", "-1"), "--entropy-above -1.0 is not 0 or more"),
        ((*TOP, "--draws", "3", "--engine", "openai"), "servers give their likeliest tokens al"),
    ],
)
def test_options_that_can_t_be_are_refused(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["out", "--seq-length", "64", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_mixture_is_scored_dataset_by_dataset(
    unscored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the launcher, and by the worker, which is in the same process here."""
    build_dataset(unscored / "more", make_texts(12, seed=3))
    file = unscored / "mixture.toml"
    file.write_text(
        '[datasets.data]\npath = "data"\n[datasets.more]\npath = "more"\nmax_epochs = 2\n'
        "[[stages]]\nweights = { data = 0.5, more = 0.5 }\n"
    )
    read: Counter[str] = Counter()
    read_index, read_file = Dataset.index_bytes, Path.read_bytes

    def count_manifest(url: str) -> bytes:
        read[url.removeprefix(f"{unscored}/")] += 1
        return read_file(Path(url))

    def count_index(dataset: Dataset, number: int) -> bytes:
        read[f"{dataset.location.removeprefix(f'{unscored}/')} {number}"] += 1
        return read_index(dataset, number)

    monkeypatch.setattr("pipeline.dataset.dataset_reading.read_whole", count_manifest)
    monkeypatch.setattr(Dataset, "index_bytes", count_index)
    arguments = [str(file), *score_arguments(unscored)[1:]]
    assert main(arguments) == 0
    indices = {f"data {number}": 1 for number in range(3)} | {"more 0": 1, "more 1": 1, "more 2": 1}
    assert read == {"data/manifest.json": 2, "more/manifest.json": 2} | indices
    read.clear()
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("is finished: the same teacher") == 2
    assert read == {"data/manifest.json": 1, "more/manifest.json": 1}
    monkeypatch.undo()

    batch = stored_rows(file).__getitems__(range(24))
    assert set(batch["source"].tolist()) == {0, 1}
    stored, online = batch["teacher_losses"], online_losses(unscored / "teacher", batch)
    has_loss = batch.teacher_has_loss
    assert int(has_loss.sum()) > 500
    torch.testing.assert_close(stored[has_loss], online[has_loss], rtol=2**-10, atol=1e-4)

    next((unscored / "more").glob("teacher-*.json")).unlink()
    other = score_arguments(unscored, "--dtype", "bfloat16")[1:]
    assert main([str(unscored / "more"), *other]) == 0
    with pytest.raises(
        ForeignLossesError, match=r'losses of "more" and of "data" come from two teac'
    ):
        stored_rows(file)
