"""Stored losses in the real trainer: an online teacher's steps without it."""

import shutil
from dataclasses import replace

import pytest

pytest.importorskip("megatron.core")

from beam_jobs.score.command import main as score_main
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import INTERLEAVED, SEQ_LENGTH, require_equal, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scored(inputs, tmp_path_factory):
    """Both datasets, with the teacher's losses."""
    folder = tmp_path_factory.mktemp("scored")
    scored = replace(inputs, data=folder / "data", validation=folder / "validation")
    for name in ("data", "validation"):
        shutil.copytree(getattr(inputs, name), folder / name)
        score(inputs, folder / name)
    return scored


def score(inputs, data):
    arguments = [str(data), "--teacher", str(inputs.teacher), "--allow-untrained-teacher"]
    lengths = ["--seq-length", str(SEQ_LENGTH), "--teacher-seq-length", "64"]
    assert score_main([*arguments, *lengths, "--dtype", "float32"]) == 0


def test_cached_and_online_gradients_agree(tmp_path, scored):
    """The validation data has losses of the same teacher, whatever names it: here nothing does."""
    validation = {"vocag_validation_data": scored.validation, "eval_interval": 1, "eval_iters": 1}
    done = train(
        scored,
        2,
        tmp_path,
        vocag_teacher_seq_length=64,
        vocag_teacher=None,
        **{"vocag_stored_losses=": ""},  # the only ones there are
        **validation,
        **INTERLEAVED,
    )
    assert "vocag/teacher_loss" in done.stdout
    assert "teacher_wait_ms" not in done.stdout
    assert "guided loss value" in done.stdout
    require_equal(tmp_path, scored, reference_gradients(scored))
