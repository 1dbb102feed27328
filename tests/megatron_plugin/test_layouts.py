"""The real trainer on the CPU: every layout takes the step that one process would take."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin.forked_ranks import fork_ranks
from tests.megatron_plugin.models import FAMILIES, save_model
from tests.megatron_plugin.reference_step import reference_gradients, reference_step
from tests.megatron_plugin.training_job import (
    CONTEXT,
    INTERLEAVED,
    MICRO_BATCH,
    ONE,
    PIPELINE,
    TENSOR,
    require_equal,
    train,
)

pytestmark = pytest.mark.slow

SEQUENCE = {**TENSOR, "sequence_parallel": ""}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# (tensor, pipeline, replicas) of the teacher's own world.
TEACHERS = {"one": (1, 1, 1), "pipeline": (1, 2, 1), "tensor": (2, 1, 1), "replicas": (1, 1, 2)}
# Student ranks and arguments; the teacher, or None where it is colocated. Neither world sees more
# of the other than its replicas, so that each has its layouts, not each pair of them.
LAYOUTS = {
    "one-colocated": (1, {**RECOMPUTED, "attention_backend": "fused"}, None),
    "one-replicas": (1, ONE, "replicas"),
    "pipeline-tensor": (2, PIPELINE, "tensor"),
    "tensor-pipeline": (2, TENSOR, "pipeline"),
    "replicas-one": (2, ONE, "one"),
    "interleaved-one": (2, INTERLEAVED, "one"),
    "context-pipeline-colocated": (4, {**CONTEXT, **PIPELINE}, None),
    "context-pipeline-one": (4, {**CONTEXT, **PIPELINE}, "one"),
    "context-sequence-colocated": (4, {**CONTEXT, **SEQUENCE}, None),
    "context-tensor-one": (4, {**CONTEXT, **TENSOR}, "one"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_gradients_are_those_of_one_process(tmp_path, inputs, layout):
    num_ranks, student, teacher = LAYOUTS[layout]
    world = {}
    if teacher is not None:
        tensor, pipeline, replicas = TEACHERS[teacher]
        world = {
            "vocag_teacher_world_size": tensor * pipeline * replicas,
            "vocag_teacher_tensor_model_parallel_size": tensor,
            "vocag_teacher_pipeline_model_parallel_size": pipeline,
        }
        num_ranks += tensor * pipeline * replicas
    # Some images export what Transformer Engine's attention reads.
    exported = {"NVTE_FLASH_ATTN": "0"}
    train(inputs, num_ranks, tmp_path, environment=exported, **student, **world)
    require_equal(tmp_path, inputs, reference_gradients(inputs))


# Ranks, arguments, and what the reference does alike.
CHOICES = {
    # Of two replicas' teacher tokens, padding left out, which a teacher scores as well.
    "by averages of parts of rows": (
        4,
        {"vocag_scope": "group", "vocag_unmapped": "mean", **CONTEXT},
        {"rows_per_choice": 2 * MICRO_BATCH, "unmapped": "mean"},
    ),
    "by entropies of a shared vocabulary": (
        2,
        {"vocag_method": "student_entropy", "vocag_teacher": None, **TENSOR},
        {"name": "student_entropy"},
    ),
    # What is mapped is known without a teacher, too.
    "without a teacher": (
        1,
        {"vocag_method": "student_loss", "vocag_teacher": None},
        {"name": "student_loss"},
    ),
    # Chunks of text lie in the places of several ranks.
    "by likelihoods of texts that ranks share": (
        4,
        {"vocag_method": "alm", "vocag_keep_fraction": 0.3, **CONTEXT, **TENSOR},
        {"name": "alm", "keep_fraction": 0.3},
    ),
    "by equal chunks of rows that ranks share": (
        2,
        {"vocag_method": "chunks", "vocag_num_chunks": 8, **CONTEXT},
        {"name": "chunks", "num_chunks": 8},
    ),
    "by a method of a user's own": (
        2,
        {"vocag_method": "tests.support.own_method", **CONTEXT},
        {"name": "tests.support.own_method"},
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_tokens_are_chosen_as_in_one_process(tmp_path, inputs, choice):
    num_ranks, changes, alike = CHOICES[choice]
    train(inputs, num_ranks, tmp_path, **changes)
    require_equal(tmp_path, inputs, reference_gradients(inputs, **alike))
    with pytest.raises(AssertionError):  # or the job would not show that it chose otherwise
        require_equal(tmp_path, inputs, reference_gradients(inputs))


def test_a_distributed_optimizer_takes_the_same_steps(tmp_path, inputs):
    """Weights of an untied output layer, in a bucket of their own, are there when it is used."""
    save_model(tmp_path, "qwen2", vocab_size=400, seed=1)
    inputs = replace(inputs, student=tmp_path)
    overlaps = {"overlap_grad_reduce": "", "overlap_param_gather": "", "ddp_bucket_size": 5000}
    whole, shared = (
        train(inputs, 2, train_iters=3, **options)
        for options in ({}, {"use_distributed_optimizer": "", **overlaps})
    )
    expected, found = guided_losses(whole), guided_losses(shared)
    assert expected[2] < expected[0] - 0.01
    assert found == pytest.approx(expected, rel=1e-4)


def guided_losses(done):
    """Return what a job minimised, step by step."""
    return [float(loss) for loss in re.findall(r"guided loss: (\S+)", done.stdout)]


def test_bf16_starts_from_the_same_losses(inputs):
    options = {"bf16": "", "vocag_teacher_dtype": "bfloat16", "use_distributed_optimizer": ""}
    done = train(inputs, 2, train_iters=2, **options)
    first, second = guided_losses(done)
    assert first == pytest.approx(reference_step(inputs)[1], rel=0.02)
    assert second < first


@pytest.mark.parametrize(("tensor", "pipeline", "expert"), [(2, 2, 1), (2, 1, 2)])
def test_losses_are_those_of_transformers(tmp_path, tensor, pipeline, expert):
    families = [name for name in FAMILIES if expert == 1 or name.startswith("qwen3_moe")]
    for family in families:
        save_model(tmp_path / family, family)
    worker = "tests.megatron_plugin.scores_worker"
    num_ranks = tensor * pipeline * expert
    done = fork_ranks(num_ranks, worker, tmp_path, tensor, pipeline, expert)
    for family in families:
        assert f"{family} " in done.stdout


def test_a_mixture_of_experts_teaches_from_two_ranks(tmp_path, inputs):
    save_model(tmp_path / "mixture", "qwen3_moe", vocab_size=480, seed=2)
    inputs = replace(inputs, teacher=tmp_path / "mixture")
    world = {"vocag_teacher_world_size": 2, "vocag_teacher_expert_model_parallel_size": 2}
    train(inputs, 3, tmp_path / "dump", **world)
    require_equal(tmp_path / "dump", inputs, reference_gradients(inputs))
