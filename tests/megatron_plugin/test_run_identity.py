"""A checkpoint goes on only in the run that it belongs to, whose data is opened once."""

import sys
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin import pretrain_gpt
from megatron_plugin.student.run_identity import ChangedRunError, RunIdentity, require_same_run
from pipeline.streaming import AlignedRows, Reading, StreamConfig, StreamMismatchError
from tests.megatron_plugin.models import make_model
from tests.support.datasets import build_dataset, remove_documents


@pytest.fixture
def run(tmp_path):
    """Rows, what the run is made of, and a way to say what its checkpoint notes."""
    build_dataset(tmp_path)
    rows = AlignedRows(StreamConfig(Reading(str(tmp_path)), seq_length=64, global_batch_size=2))
    identity = RunIdentity(asdict(rows.state(0)), "teacher-1", {"aggregation": "max"})

    def resume_from(noted, *, consumed=4, before=None, now=None):
        saved = Namespace() if noted is None else Namespace(vocag_run=asdict(noted))
        saved.vocag_model_config = before
        args = Namespace(load="checkpoint", consumed_train_samples=consumed, vocag_model_config=now)
        require_same_run(args, saved, identity, rows)

    return identity, resume_from


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": "teacher-2"}, "made with teacher teacher-2, this run has teacher-1"),
        ({"teacher": None}, "made with teacher None"),
        ({"guidance": {"aggregation": "sum"}}, r"made with guidance \{'aggregation': 'sum'\}"),
    ],
)
def test_another_teacher_or_guidance_is_refused(run, change, message):
    identity, resume_from = run
    resume_from(identity)
    with pytest.raises(ChangedRunError, match=message):
        resume_from(replace(identity, **change))


def test_other_data_and_a_cut_step_are_refused(run):
    identity, resume_from = run
    with pytest.raises(StreamMismatchError, match="made with fingerprint"):
        resume_from(replace(identity, stream=identity.stream | {"fingerprint": 7}))
    with pytest.raises(StreamMismatchError, match="consumed 3 samples"):
        resume_from(identity, consumed=3)


def test_a_foreign_checkpoint_is_refused(run):
    _, resume_from = run
    with pytest.raises(ChangedRunError, match=r"not saved by this trainer.*--finetune"):
        resume_from(None)


def test_positions_that_rotate_otherwise_are_refused(run):
    identity, resume_from = run
    scaled, plain = (make_model(family).config.to_dict() for family in ("llama_scaled", "llama"))
    resume_from(identity, before=scaled, now=scaled)
    with pytest.raises(ChangedRunError, match=r"rope_parameters .*llama3.*--vocag-student"):
        resume_from(identity, before=scaled, now=plain)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_rank_opens_its_data_once(tmp_path, monkeypatch, resumed):
    """Of a dataset that has grown a run that goes on also reads its own generation's manifest."""
    folders = [tmp_path / "data", tmp_path / "validation"]
    for folder in folders:
        build_dataset(folder)
    arguments = ["--vocag-data", str(folders[0]), "--vocag-validation-data", str(folders[1])]
    arguments += ["--vocag-method", "full"]
    sizes = {"seq_length": 64, "global_batch_size": 2, "eval_global_batch_size": 2}
    megatron = Namespace(seed=1234, eval_iters=1, **sizes)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *arguments])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def open_rows():
        run = pretrain_gpt.enter()
        run._data.open_held_out(megatron)
        rows = run._data.training_rows(megatron)
        run._data._validation_rows(run._data._held_out, megatron)
        return rows

    started_on = open_rows().state(2)
    if resumed:
        remove_documents(folders[0], "doc-0-3")
        checkpoint = Namespace(vocag_run={"stream": asdict(started_on)})
        monkeypatch.setattr(pretrain_gpt, "read_checkpoint", lambda args: checkpoint)
    read = Counter()

    def read_whole(url):
        read[url.removeprefix(f"{tmp_path}/")] += 1
        return Path(url).read_bytes()

    monkeypatch.setattr("pipeline.dataset.dataset_reading.read_whole", read_whole)
    assert open_rows().restore(started_on) == 2
    assert set(read.values()) == {1}
    assert {"data/manifest.json", "validation/manifest.json"} <= set(read)
    assert len(read) == 2 + resumed
