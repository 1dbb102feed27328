"""The teacher's distributions in the real trainer, online and stored, as in one process."""

import re
import shutil
from dataclasses import replace

import pytest

pytest.importorskip("megatron.core")

from beam_jobs.score.command import main as score_main
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import (
    CONTEXT,
    PIPELINE,
    SEQ_LENGTH,
    TENSOR,
    require_equal,
    train,
)

pytestmark = pytest.mark.slow

DISTILL = {"vocag_method": "distill", "vocag_top_k": 8}
ALIKE = {"name": "distill", "top_k": 8}
TEACHER = {"vocag_teacher_world_size": 2}
# Student ranks, arguments, and what the reference does alike.
LAYOUTS = {
    "pipeline-pipeline": (
        4,
        {
            **PIPELINE,
            **TEACHER,
            "vocag_teacher_pipeline_model_parallel_size": 2,
            "vocag_temperature": 2.0,
        },
        {"temperature": 2.0},
    ),
    "tensor-tensor": (
        4,
        {
            **TENSOR,
            **TEACHER,
            "sequence_parallel": "",
            "vocag_teacher_tensor_model_parallel_size": 2,
            "vocag_distill_tokens": "kept",
            "vocag_reverse_kl": "",
        },
        {"distill_tokens": "kept", "reverse_kl": True},
    ),
    "context-colocated": (
        4,
        {
            **CONTEXT,
            **TENSOR,
            "vocag_distill_tokens": "dropped",
            "vocag_distill_by": "student_entropy",
            "vocag_draws": 3,
        },
        {"distill_tokens": "dropped", "distill_by": "student_entropy", "draws": 3},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_gradients_are_those_of_one_process(tmp_path, inputs, layout):
    num_ranks, changes, alike = LAYOUTS[layout]
    done = train(inputs, num_ranks, tmp_path, **DISTILL, **changes)
    require_equal(tmp_path, inputs, reference_gradients(inputs, **ALIKE, **alike))
    logged = ("taught_fraction", "distribution_fraction", "mass_held", "crossing_fraction")
    for name in ("divergence", *logged, "cell_loss"):
        assert f"vocag/{name}" in done.stdout
    with pytest.raises(AssertionError):
        require_equal(tmp_path, inputs, reference_gradients(inputs))


@pytest.mark.parametrize("draws", [0, 3])
def test_stored_distributions_are_the_online_ones_rounded(tmp_path, inputs, draws):
    scored = replace(inputs, data=tmp_path / "data")
    shutil.copytree(inputs.data, scored.data)
    arguments = [str(scored.data), "--teacher", str(inputs.teacher), "--allow-untrained-teacher"]
    arguments += ["--seq-length", str(SEQ_LENGTH), "--teacher-seq-length", "64", "--top-k", "8"]
    # 8 bits may lift a place over the rule for amid a token
    arguments += ["--top-log-probs", "float16", "--draws", str(draws)]
    assert score_main([*arguments, "--dtype", "float32"]) == 0
    changes = {"vocag_teacher_seq_length": 64, "vocag_teacher": None, "vocag_method": "distill"}
    changes |= {"vocag_stored_losses=": "", **PIPELINE}
    stored = train(scored, 2, tmp_path / "dump", **changes)
    expected = reference_gradients(inputs, **ALIKE, draws=draws)
    require_equal(tmp_path / "dump", scored, expected, rtol=0.05, atol=0.01)
    with pytest.raises(AssertionError):
        require_equal(tmp_path / "dump", scored, expected)
    with pytest.raises(AssertionError):
        require_equal(tmp_path / "dump", scored, reference_gradients(inputs), rtol=0.05, atol=0.01)
    if draws:
        others = reference_gradients(inputs, **ALIKE)
        with pytest.raises(AssertionError):
            require_equal(tmp_path / "dump", scored, others, rtol=0.05, atol=0.01)
        ranks = {**TENSOR, **TEACHER, "vocag_teacher_tensor_model_parallel_size": 2}
        online = train(inputs, 4, tmp_path / "online", **DISTILL, vocag_draws=draws, **ranks)
        require_equal(tmp_path / "online", inputs, expected)
        assert logged(online) == pytest.approx(logged(stored), rel=2e-3)


def logged(done):
    """Return what a run's only step has logged of the loss, by name."""
    found = dict(re.findall(r"((?:lm|guided) loss|vocag/[a-z_]+): ([0-9.E+-]+)", done.stdout))
    assert {"guided loss", "vocag/divergence"} < found.keys()
    return {name: float(value) for name, value in found.items() if not name.endswith("_ms")}
