"""The real trainer on the CPU: every layout takes the step that one process would take."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_plugin.export_hf import export_student
from pipeline.models.hf_models import load_language_model
from pipeline.streaming import AlignedRows, load_batches
from pipeline.training.config import TrainConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.loop import Run, train_step
from pipeline.training.method import Method
from pipeline.training.ranks import Ranks
from tests.megatron_plugin.launch import ROOT, torchrun
from tests.megatron_plugin.models import FAMILIES, save_model
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import (
    CONTEXT,
    GLOBAL_BATCH,
    INTERLEAVED,
    MICRO_BATCH,
    ONE,
    PIPELINE,
    SEQ_LENGTH,
    TENSOR,
    Inputs,
    make_inputs,
    require_equal,
    train,
    train_forked,
)
from tests.support.datasets import build_dataset, byte_level, make_texts

pytestmark = pytest.mark.slow

# Student ranks and arguments; (tensor, pipeline, replicas) of the teacher's own world.
STUDENTS = {"one": (1, ONE), "pipeline": (2, PIPELINE), "tensor": (2, TENSOR), "replicas": (2, ONE)}
TEACHERS = {"one": (1, 1, 1), "pipeline": (1, 2, 1), "tensor": (2, 1, 1), "replicas": (1, 1, 2)}
LAYOUTS = {
    f"{student}-{teacher}": (*STUDENTS[student], TEACHERS.get(teacher))
    for student in STUDENTS
    for teacher in ("colocated", *TEACHERS)
} | {
    "interleaved-one": (2, INTERLEAVED, TEACHERS["one"]),
    "sequence-colocated": (2, {**TENSOR, "sequence_parallel": ""}, None),
    "context-colocated": (2, CONTEXT, None),
    "context-one": (2, CONTEXT, TEACHERS["one"]),
    "context-pipeline-colocated": (4, {**CONTEXT, **PIPELINE}, None),
    "context-pipeline-one": (4, {**CONTEXT, **PIPELINE}, TEACHERS["one"]),
    "context-tensor-colocated": (4, {**CONTEXT, **TENSOR, "sequence_parallel": ""}, None),
    "context-tensor-one": (4, {**CONTEXT, **TENSOR}, TEACHERS["one"]),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def references(inputs):
    """Gradients by the number of rows that share one choice of tokens."""
    return {
        rows: reference_gradients(
            inputs,
            seq_length=SEQ_LENGTH,
            global_batch_size=GLOBAL_BATCH,
            rows_per_choice=rows,
        )
        for rows in (MICRO_BATCH, 2 * MICRO_BATCH)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_gradients_are_those_of_one_process(tmp_path, inputs, references, layout):
    num_ranks, student, teacher = LAYOUTS[layout]
    world = {}
    if teacher is not None:
        tensor, pipeline, replicas = teacher
        world = {
            "vocag_teacher_world_size": tensor * pipeline * replicas,
            "vocag_teacher_tensor_model_parallel_size": tensor,
            "vocag_teacher_pipeline_model_parallel_size": pipeline,
        }
        num_ranks += tensor * pipeline * replicas
    train_forked(inputs, num_ranks, tmp_path, **student, **world)
    require_equal(tmp_path, inputs, references[MICRO_BATCH][0])


def test_replicas_can_choose_together(tmp_path, inputs, references):
    train_forked(inputs, 2, tmp_path, vocag_scope="group")
    require_equal(tmp_path, inputs, references[2 * MICRO_BATCH][0])


@pytest.mark.parametrize(
    ("num_ranks", "student"), [(2, ONE), (4, CONTEXT)], ids=["rows", "parts of rows"]
)
def test_unmapped_tokens_take_the_average_of_all_teacher_losses(
    tmp_path, inputs, references, num_ranks, student
):
    """Of two replicas' teacher tokens, padding left out, which a teacher scores as well."""
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=2 * MICRO_BATCH,
        unmapped="mean",
    )
    train_forked(inputs, num_ranks, tmp_path, vocag_scope="group", vocag_unmapped="mean", **student)
    require_equal(tmp_path, inputs, expected)
    with pytest.raises(AssertionError):
        require_equal(tmp_path, inputs, references[2 * MICRO_BATCH][0])


def test_entropies_span_the_vocabulary_of_all_ranks(tmp_path, inputs, references):
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=MICRO_BATCH,
        selector="student_entropy",
    )
    train_forked(inputs, 2, tmp_path, vocag_method="student_entropy", **TENSOR)
    require_equal(tmp_path, inputs, expected)
    with pytest.raises(AssertionError):
        require_equal(tmp_path, inputs, references[MICRO_BATCH][0])


def test_the_reference_is_the_plain_trainers_step(inputs, references):
    found = plain_trainer_gradients(inputs)
    expected, _ = references[MICRO_BATCH]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_a_checkpoint_of_the_students_vocabulary_is_rho1s_reference(tmp_path):
    one = byte_level(400)
    build_dataset(tmp_path / "data", make_texts(80), num_shards=2, student=one, teacher=one)
    save_model(tmp_path / "student", "qwen2_tied", vocab_size=400, seed=1, num_hidden_layers=4)
    save_model(tmp_path / "untrained", "llama", vocab_size=400, seed=3)
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"

    def inputs(reference):
        return Inputs(tmp_path / "data", tmp_path / "data", tmp_path / "student", reference)

    train(
        inputs(None),
        1,
        vocag_student=tmp_path / "untrained",
        vocag_teacher=None,
        save=checkpoint,
        save_interval=1,
    )
    export_student(checkpoint, exported)
    # Not name="rho1", where ends of documents compete with the rest: they have no teacher token,
    # so that Megatron keeps them all, as docs/megatron.md says.
    expected = plain_trainer_gradients(inputs(exported), name="teacher", keep_fraction=0.6)
    train_forked(inputs(checkpoint), 1, tmp_path / "dump", vocag_keep_fraction=0.6)
    require_equal(tmp_path / "dump", inputs(checkpoint), expected)


def plain_trainer_gradients(inputs, **method):
    """Return the gradients of the first step of the plain trainer, on Megatron's rows."""
    config = TrainConfig(
        data=str(inputs.data),
        student=str(inputs.student),
        teacher=str(inputs.teacher),
        output=inputs.data / "unused",
        method=Method(**method),
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        seed=1234,
        clip_norm=1e9,
    )
    stream = replace(config.stream(config.data), global_batch_size=GLOBAL_BATCH)
    rows = AlignedRows(stream)
    student, teacher = (load_language_model(folder) for folder in (config.student, config.teacher))
    run = Run(
        config,
        Ranks(torch.device("cpu")),
        rows,
        student,
        GuidedStudent(student, config.method),
        teacher,
        Unmoved(student.parameters()),
    )
    train_step(run, iter(load_batches(rows, micro_batch_size=MICRO_BATCH)), 0)
    return {name: parameter.grad for name, parameter in student.named_parameters()}


class Unmoved(torch.optim.SGD):
    """Leaves weights and gradients as they are."""

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


def test_without_a_teacher_selectors_still_know_what_is_mapped(tmp_path, inputs):
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=MICRO_BATCH,
        selector="student_loss",
    )
    train_forked(inputs, 1, tmp_path, vocag_method="student_loss", vocag_teacher=None)
    require_equal(tmp_path, inputs, expected)


def test_recomputed_layers_give_the_same_gradients(tmp_path, inputs, references):
    options = {"recompute_granularity": "full", "recompute_method": "uniform"}
    train_forked(inputs, 1, tmp_path, recompute_num_layers=1, **options)
    require_equal(tmp_path, inputs, references[MICRO_BATCH][0])


def test_a_distributed_optimizer_takes_the_same_steps(inputs):
    overlaps = {"overlap_grad_reduce": "", "overlap_param_gather": ""}
    whole, shared = (
        train_forked(inputs, 2, train_iters=4, **options)
        for options in ({}, {"use_distributed_optimizer": "", **overlaps})
    )
    expected, found = guided_losses(whole), guided_losses(shared)
    assert expected[3] < expected[0] - 0.01
    assert found == pytest.approx(expected, rel=1e-4)


def guided_losses(done):
    """Return what a job minimised, step by step."""
    return [float(loss) for loss in re.findall(r"guided loss: (\S+)", done.stdout)]


def test_bf16_starts_from_the_same_losses(inputs, references):
    options = {"bf16": "", "vocag_teacher_dtype": "bfloat16", "use_distributed_optimizer": ""}
    done = train_forked(inputs, 2, train_iters=2, **options)
    first, second = guided_losses(done)
    assert first == pytest.approx(references[MICRO_BATCH][1], rel=0.02)
    assert second < first


def test_references_differ_by_their_scope(references):
    # Otherwise the replicas' layouts would not show that the choice spans them.
    one, two = (reference[0] for reference in references.values())
    assert any(not torch.allclose(one[name], two[name], atol=1e-7) for name in one)


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_and_losses_are_those_of_transformers(tmp_path, tensor, pipeline):
    for family in FAMILIES:
        save_model(tmp_path / family, family)
    worker = ROOT / "tests/megatron_plugin/scores_worker.py"
    done = torchrun(tensor * pipeline, worker, tmp_path, tensor, pipeline, 1)
    for family in FAMILIES:
        assert f"{family} " in done.stdout


def test_a_mixture_of_experts_teaches_from_two_ranks(tmp_path, inputs):
    save_model(tmp_path / "mixture", "qwen3_moe", vocab_size=480, seed=2)
    inputs = replace(inputs, teacher=tmp_path / "mixture")
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=MICRO_BATCH,
    )
    world = {"vocag_teacher_world_size": 2, "vocag_teacher_expert_model_parallel_size": 2}
    train_forked(inputs, 3, tmp_path / "dump", **world)
    require_equal(tmp_path / "dump", inputs, expected)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_experts_of_a_teacher_may_lie_on_several_ranks(tmp_path, tensor, pipeline):
    families = [family for family in FAMILIES if family.startswith("qwen3_moe")]
    assert families
    for family in families:
        save_model(tmp_path / family, family)
    worker = ROOT / "tests/megatron_plugin/scores_worker.py"
    done = torchrun(2 * tensor * pipeline, worker, tmp_path, tensor, pipeline, 2)
    for family in families:
        assert f"{family} " in done.stdout
