"""The score job: the same sidecars whatever happens, and errors that say what to do."""

import json
import os
import re
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from beam_jobs.errors import OptionsError
from beam_jobs.score import steps as scoring
from beam_jobs.score.command import main
from beam_jobs.score.job import score
from beam_jobs.score.options import ScoreOptions, parse_options
from pipeline.models.teacher_files import find_teacher
from schemas.errors import ForeignTokenizerError
from schemas.manifest import MANIFEST_FILE
from schemas.sidecar import decode_score_manifest, decode_sidecar
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model
from tests.support.scored_data import run_score, score_arguments, sidecars, write_world
from vocag_cli import COMMANDS

KILLED_AFTER = """
import os, signal, sys
from beam_jobs.score import steps as scoring
original, calls = scoring._write, []
def die(job, path, data):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    original(job, path, data)
scoring._write = die
from beam_jobs.score.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return write_world(tmp_path)


def manifest_of(world: Path) -> Path:
    (path,) = (world / "data").glob("teacher-*.json")
    return path


def test_a_run_leaves_a_sidecar_per_shard_and_nothing_else(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in (world / "data").glob("*") if path.is_file()}
    run_score(world)
    shown = capsys.readouterr().out
    assert re.search(r"scored 40 documents in .*: .* teacher tokens/s", shown)
    assert re.search(r"\d+ documents split\n .* 3, .* bytes a teacher token\n", shown)
    assert re.search(r"padding +[0-4]\.\d+ %\n", shown)
    assert "FLOP/s that plain matrix products reach here (float32)" in shown
    path = manifest_of(world)
    scores = decode_score_manifest(path.read_bytes(), where="")
    for record in scores.sidecars:
        data = (world / "data" / record.file).read_bytes()
        losses = decode_sidecar(data, where=record.file)
        assert (len(data), sha256(data).hexdigest()) == (record.num_bytes, record.sha256)
        assert losses.teacher == scores.rule.fingerprint
        assert (
            losses.shard_sha256 == sha256((world / "data" / record.shard).read_bytes()).hexdigest()
        )
        assert len(losses.losses) == losses.starts[-1] == record.num_tokens == record.num_losses
        assert np.isclose(record.loss_sum, losses.losses.astype(float).sum())
        np.testing.assert_array_equal(load(data)["losses"], losses.losses)
    after = {path: path.read_bytes() for path in before}
    assert after == before
    new = {path.name for path in (world / "data").iterdir()} - {path.name for path in before}
    assert new == {record.file for record in scores.sidecars} | {path.name, "tokenizers"}


def test_a_finished_run_is_not_done_again(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_score(world)
    before = sidecars(world)
    monkeypatch.setattr(scoring, "score_shard", None)  # raises where it is called
    run_score(world)
    assert "is finished: the same teacher, rule and data made it" in capsys.readouterr().out
    assert sidecars(world) == before


def test_the_dtype_is_tried_and_stays(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [a for a in score_arguments(world) if a not in ("--dtype", "float32")]
    assert main(arguments) == 0
    dtype, speedup = re.findall(
        r"scoring in (\w+): this CPU multiplies in bfloat16 ([\d.]+) x as fast as in float32;",
        capsys.readouterr().out,
    )[0]
    assert dtype == ("bfloat16" if float(speedup) >= 1.2 else "float32")
    assert decode_score_manifest(manifest_of(world).read_bytes(), where="").rule.dtype == dtype
    manifest_of(world).unlink()
    run_score(world, "--dtype", "float32" if dtype == "bfloat16" else "bfloat16")
    capsys.readouterr()
    assert main(arguments) == 0
    assert "is finished: the same teacher" in capsys.readouterr().out, "whatever a trial says"


def test_a_few_documents_say_what_all_would_take(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in (world / "data").iterdir())
    run_score(world, "--limit", "15")
    shown = capsys.readouterr().out
    mean = float(
        re.findall(r"tried 15 documents, .* \(float32\), mean loss ([\d.]+) nats", shown)[0]
    )
    assert "nothing was written: leave out --limit to score them" in shown
    assert sorted(path.name for path in (world / "data").iterdir()) == before
    run_score(world)
    scores = decode_score_manifest(manifest_of(world).read_bytes(), where="")
    losses: list[float] = []
    documents = 0
    for record in scores.sidecars:
        data = (world / "data" / record.file).read_bytes()
        sidecar = decode_sidecar(data, where=record.file)
        for start, stop in zip(sidecar.starts[:-1], sidecar.starts[1:], strict=True):
            if documents < 15:
                losses += sidecar.losses[start:stop].astype(float).tolist()
            documents += 1
    assert documents == 40
    assert mean == pytest.approx(np.nanmean(losses), abs=2e-3)
    with pytest.raises(OptionsError, match="--limit 0 is below 1 document"):
        parse_options(score_arguments(world, "--limit", "0"))


@pytest.mark.slow
@pytest.mark.parametrize("call", [3, 5])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(world: Path, call: int) -> None:
    run_score(world)
    reference = sidecars(world)
    for name in reference:
        (world / "data" / name).unlink()
    command = [sys.executable, "-c", KILLED_AFTER.format(call=call), *score_arguments(world)]
    killed = subprocess.run(command, env=os.environ, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = sidecars(world)
    assert len(left) == min(call - 1, 3)
    assert left.items() <= reference.items()
    run_score(world)
    assert sidecars(world) == reference
    assert not list((world / "data").glob(".vocag-*"))


def test_shards_that_an_earlier_run_has_scored_are_taken_over(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_score(world)
    reference = sidecars(world)
    names = [name for name in reference if name.endswith(".safetensors")]
    manifest_of(world).unlink()
    cut, foreign = (world / "data" / name for name in names[:2])
    cut.write_bytes(reference[names[0]][:-9])
    foreign.write_bytes(reference[names[2]])  # of another shard
    read = []
    original = scoring.read_teacher_tokens
    monkeypatch.setattr(
        scoring, "read_teacher_tokens", lambda *a, **k: read.append(a[1]) or original(*a, **k)
    )
    run_score(world)
    assert sorted(read) == [0, 1]
    assert "resumed         1 shards were taken over" in capsys.readouterr().out
    assert sidecars(world) == reference


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(world: Path) -> None:
    run_score(world)
    reference = sidecars(world)
    for name in reference:
        (world / "data" / name).unlink()
    workers = ("--workers", "2")
    command = [sys.executable, "-m", "beam_jobs.score", *score_arguments(world, *workers)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert sidecars(world) == reference


def test_teachers_and_rules_stand_side_by_side(world: Path) -> None:
    write_model(world / "other", byte_level(480), seed=5)
    run_score(world)
    run_score(world, "--teacher", str(world / "other"))
    run_score(world, seq_length=128)
    run_score(world, "--dtype", "bfloat16")
    run_score(world, "--stride", "30", "--teacher-seq-length", "60", seq_length=None)
    assert len(sidecars(world)) == 5 * 4
    contexts = [
        json.loads(path.read_text())["sidecars"][0]["context_sha256"]
        for path in (world / "data").glob("teacher-*.json")
    ]
    assert len(set(contexts)) == 3


def test_a_teacher_that_guesses_stops_the_job(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [a for a in score_arguments(world) if a != "--allow-untrained-teacher"]
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert "mean loss on a plain English text is 6." in message
    assert "chance is 6.17: its weights did not load" in message
    assert not sidecars(world)


def test_a_damaged_document_stops_the_job_by_name(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = sorted((world / "data").glob("*.tar"))[1]
    data = bytearray(tar.read_bytes())
    data[5000] ^= 255
    tar.write_bytes(data)
    assert main(score_arguments(world)) == 1
    assert re.search(r"sample \w{32} in shard docs-000001-of-000003.tar has CRC-32",
                     capsys.readouterr().err)  # fmt: skip
    assert not list((world / "data").glob("teacher-*.json"))


def test_another_teacher_s_tokens_are_refused(world: Path, tmp_path: Path) -> None:
    options = ScoreOptions(str(world / "data"), str(world / "student"), seq_length=64)
    with pytest.raises(ForeignTokenizerError, match=r"teacher tokenizer .* is not the dataset's"):
        score(options)


def test_a_folder_without_a_dataset_or_a_model_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no config.json with \*.safetensors"):
        find_teacher(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"no such folder or .gguf file, and no Hugging Face"):
        find_teacher("nowhere.gguf")
    assert main([str(tmp_path / "empty"), "--teacher", "t", "--seq-length", "64"]) == 2
    assert f"{MANIFEST_FILE} does not exist" in capsys.readouterr().err
    assert main(score_arguments(world, "--studnet=x")) == 2
    assert "neither score nor Beam knows --studnet=x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --seq-length, .* or --stride"),
        (["--seq-length", "64", "--stride", "8"], "one of the two"),
        (["--stride", "8"], "--stride 8 needs --teacher-seq-length"),
        (["--seq-length", "64", "--threads", "-1"], "--threads -1 is below 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        parse_options(["out", "--teacher", "t", *arguments])


def test_a_stride_without_overlap_is_refused(world: Path) -> None:
    options = ScoreOptions(
        str(world / "data"), str(world / "teacher"), teacher_seq_length=64, stride=64
    )
    with pytest.raises(OptionsError, match=r"stride 64 is not in 1 … 62: windows of 64 tokens"):
        score(options)


def test_vocag_score_is_a_command() -> None:
    assert COMMANDS["score"][:2] == ("beam_jobs.score.command", "beam,hf")
