"""A checkpoint goes on only in the run that it belongs to."""

from argparse import Namespace
from dataclasses import asdict, replace

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin.student import run_identity
from megatron_plugin.student.run_identity import ChangedRunError, RunIdentity, require_same_run
from pipeline.streaming import AlignedRows, StreamConfig, StreamMismatchError
from tests.megatron_plugin.models import make_model
from tests.support.datasets import build_dataset


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Rows, what the run is made of, and a way to say what its checkpoint notes."""
    build_dataset(tmp_path)
    rows = AlignedRows(StreamConfig(path=str(tmp_path), seq_length=64, global_batch_size=2))
    identity = RunIdentity(asdict(rows.state(0)), "teacher-1", {"aggregation": "max"})

    def resume_from(noted, *, consumed=4, before=None, now=None):
        saved = Namespace() if noted is None else Namespace(vocag_run=asdict(noted))
        saved.vocag_model_config = before
        monkeypatch.setattr(run_identity, "newest_iteration", lambda folder: folder)
        monkeypatch.setattr(run_identity, "checkpoint_args", lambda folder: saved)
        args = Namespace(load="checkpoint", consumed_train_samples=consumed, vocag_model_config=now)
        require_same_run(args, identity, rows)

    return identity, resume_from


def test_the_same_run_goes_on(run):
    identity, resume_from = run
    resume_from(identity)


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
    with pytest.raises(ChangedRunError, match=message):
        resume_from(replace(identity, **change))


@pytest.mark.parametrize("name", ["fingerprint", "seed", "seq_length", "samples_per_epoch"])
def test_other_data_is_refused(run, name):
    identity, resume_from = run
    with pytest.raises(StreamMismatchError, match=f"made with {name}"):
        resume_from(replace(identity, stream=identity.stream | {name: 7}))


def test_a_cut_step_is_refused(run):
    identity, resume_from = run
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
