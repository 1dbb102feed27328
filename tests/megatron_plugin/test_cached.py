"""Stored losses in the real trainer: an online teacher's steps without it; and who stores them."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from beam_jobs.score.command import main as score_main
from pipeline.validate.dataset import validate_dataset
from schemas.sidecar import decode_sidecar
from tests.megatron_plugin.forked_ranks import fork_ranks
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import INTERLEAVED, ONE, SEQ_LENGTH, require_equal, train

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


def score(inputs, data, *more):
    arguments = [str(data), "--teacher", str(inputs.teacher), "--allow-untrained-teacher"]
    lengths = ["--seq-length", str(SEQ_LENGTH), "--teacher-seq-length", "64"]
    assert score_main([*arguments, *lengths, "--dtype", "float32", *more]) == 0


@pytest.mark.parametrize(("num_ranks", "student"), [(1, ONE), (2, INTERLEAVED)])
def test_cached_and_online_gradients_agree(tmp_path, scored, num_ranks, student):
    """The validation data has losses of the same teacher, whatever names it: here nothing does."""
    validation = {"vocag_validation_data": scored.validation, "eval_interval": 1, "eval_iters": 1}
    done = train(
        scored,
        num_ranks,
        tmp_path,
        vocag_teacher_seq_length=64,
        vocag_teacher=None,
        **{"vocag_stored_losses=": ""},  # the only ones there are
        **validation,
        **student,
    )
    assert "vocag/teacher_loss" in done.stdout
    assert "teacher_wait_ms" not in done.stdout
    assert "guided loss value" in done.stdout
    require_equal(tmp_path, scored, reference_gradients(scored))


# Two copies of the teacher share out the shards; four ranks hold one copy.
@pytest.mark.parametrize(("num_ranks", "parallel"), [(2, 1), (4, 2)])
def test_megatron_writes_the_sidecars_of_the_beam_job(scored, tmp_path, num_ranks, parallel):
    data = tmp_path / "data"
    shutil.copytree(scored.data, data)
    names = {path.name for path in data.glob("*teacher-*")}
    reference = {name: (data / name).read_bytes() for name in names}
    for name in names:
        (data / name).unlink()
    command = [
        *("--teacher", scored.teacher, "--seq-length", SEQ_LENGTH, "--teacher-seq-length", 64),
        *("--dtype", "float32", "--distributed-backend", "gloo", "--micro-batch-size", 2),
        *("--tensor-model-parallel-size", parallel, "--pipeline-model-parallel-size", parallel),
        "--allow-untrained-teacher",
    ]
    fork_ranks(num_ranks, "tests.megatron_plugin.scorer", data, *command)
    assert {path.name for path in data.glob("*teacher-*")} == names
    assert not list(data.glob(".*partial"))
    for name in names:
        if name.endswith(".json"):
            continue
        written = (data / name).read_bytes()
        assert len(written) == len(reference[name])
        ours, theirs = (decode_sidecar(each, where=name) for each in (written, reference[name]))
        assert (ours.teacher, ours.shard_sha256) == (theirs.teacher, theirs.shard_sha256)
        np.testing.assert_array_equal(ours.starts, theirs.starts)
        np.testing.assert_allclose(
            ours.losses.astype(float), theirs.losses.astype(float), rtol=2**-10, atol=1e-4
        )
    # Each goes on where the other stopped.
    score(scored, data)
    assert validate_dataset(str(data)).findings == ()
