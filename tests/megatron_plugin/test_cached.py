"""Stored losses in the real trainer: an online teacher's steps, in every layout, without it."""

import shutil

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from beam_jobs.score.command import main as score_main
from pipeline.validate.dataset import validate_dataset
from schemas.sidecar import decode_sidecar
from tests.megatron_plugin.launch import torchrun
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import (
    GLOBAL_BATCH,
    INTERLEAVED,
    MICRO_BATCH,
    ONE,
    PIPELINE,
    SEQ_LENGTH,
    TENSOR,
    make_inputs,
    require_equal,
    train_forked,
)

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one": (1, ONE),
    "pipeline": (2, PIPELINE),
    "interleaved": (2, INTERLEAVED),
    "tensor": (2, TENSOR),
    "replicas": (2, ONE),
}
# The only ones there are.
STORED = {"vocag_teacher": None, "vocag_stored_losses=": ""}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    for data in (inputs.data, inputs.validation):
        score(inputs, data)
    return inputs


def score(inputs, data, *more):
    arguments = [str(data), "--teacher", str(inputs.teacher), "--allow-untrained-teacher"]
    lengths = ["--seq-length", str(SEQ_LENGTH), "--teacher-seq-length", "64"]
    assert score_main([*arguments, *lengths, "--dtype", "float32", *more]) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_and_online_gradients_agree(tmp_path, inputs, layout):
    num_ranks, student = LAYOUTS[layout]
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=MICRO_BATCH,
    )
    done = train_forked(
        inputs, num_ranks, tmp_path, vocag_teacher_seq_length=64, **STORED, **student
    )
    assert "vocag/teacher_loss" in done.stdout
    assert "teacher_wait_ms" not in done.stdout
    require_equal(tmp_path, inputs, expected)


def test_validation_takes_the_same_teachers_losses(inputs):
    done = train_forked(
        inputs,
        1,
        vocag_teacher_seq_length=64,
        vocag_validation_data=inputs.validation,
        eval_interval=1,
        eval_iters=1,
        vocag_teacher=None,
        vocag_stored_losses=inputs.teacher.name,
    )
    assert "guided loss value" in done.stdout


def test_losses_for_other_lengths_are_refused_before_training(inputs):
    done = train_forked(inputs, 1, check=False, vocag_teacher_seq_length=48, **STORED)
    assert done.returncode != 0
    assert "split them elsewhere" in done.stderr
    assert "--teacher-seq-length 48" in done.stderr


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)], ids=["replicas", "tensor", "pipeline"])
def test_megatron_writes_the_sidecars_of_the_beam_job(inputs, tmp_path, sizes):
    data = tmp_path / "data"
    shutil.copytree(inputs.data, data)
    names = {path.name for path in data.glob("*teacher-*")}
    reference = {name: (data / name).read_bytes() for name in names}
    for name in names:
        (data / name).unlink()
    command = [
        *("--teacher", inputs.teacher, "--seq-length", SEQ_LENGTH, "--teacher-seq-length", 64),
        *("--dtype", "float32", "--distributed-backend", "gloo", "--micro-batch-size", 2),
        *("--tensor-model-parallel-size", sizes[0], "--pipeline-model-parallel-size", sizes[1]),
        "--allow-untrained-teacher",
    ]
    torchrun(2, "-m", "tests.megatron_plugin.scorer", data, *command)
    assert {path.name for path in data.glob("*teacher-*")} == names
    assert not list(data.glob(".*partial"))
    for name in names:
        if name.endswith(".json"):
            continue
        ours, theirs = (decode_sidecar(d, where=name) for d in (
            (data / name).read_bytes(), reference[name]))  # fmt: skip
        assert len((data / name).read_bytes()) == len(reference[name])
        assert (ours.teacher, ours.shard_sha256) == (theirs.teacher, theirs.shard_sha256)
        np.testing.assert_array_equal(ours.starts, theirs.starts)
        np.testing.assert_allclose(
            ours.losses.astype(float), theirs.losses.astype(float), rtol=2**-10, atol=1e-4
        )
    # Each goes on where the other stopped.
    score(inputs, data)
    assert validate_dataset(str(data)).findings == ()
