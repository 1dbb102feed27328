"""The real trainer on the CPU: every layout takes the step that one process would take."""

import pytest
import torch

pytest.importorskip("megatron.core")

from pipeline.hf_models import load_language_model
from pipeline.streaming import AlignedRows, StreamConfig
from tests.megatron.launch import ROOT, torchrun
from tests.megatron.models import FAMILIES, save_model
from tests.megatron.reference_step import reference_gradients
from tests.megatron.training_job import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SEQ_LENGTH,
    make_inputs,
    merged,
    train,
)

pytestmark = pytest.mark.slow

ONE = {}
PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "num_layers_per_virtual_pipeline_stage": 1}
# Student ranks, student arguments, teacher ranks, (tensor, pipeline) of the teacher.
LAYOUTS = {
    "one-colocated": (1, ONE, 0, (1, 1)),
    "one-replicas": (1, ONE, 2, (1, 1)),
    "pipeline-colocated": (2, PIPELINE, 0, (1, 1)),
    "pipeline-pipeline": (2, PIPELINE, 2, (1, 2)),
    "interleaved-one": (2, INTERLEAVED, 1, (1, 1)),
    "tensor-tensor": (2, TENSOR, 2, (2, 1)),
    "replicas-one": (2, ONE, 1, (1, 1)),
    "replicas-pipeline": (2, ONE, 2, (1, 2)),
    "replicas-replicas": (2, ONE, 2, (1, 1)),
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
    student_ranks, student, teacher_ranks, (tensor, pipeline) = LAYOUTS[layout]
    train(
        inputs,
        student_ranks + teacher_ranks,
        tmp_path,
        vocag_teacher_world_size=teacher_ranks,
        vocag_teacher_tensor_model_parallel_size=tensor,
        vocag_teacher_pipeline_model_parallel_size=pipeline,
        **student,
    )
    replicas = 2 if student_ranks == 2 and student is ONE else 1
    require_equal(tmp_path, inputs, references[replicas * MICRO_BATCH][0])


def test_entropies_span_the_vocabulary_of_all_ranks(tmp_path, inputs, references):
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=MICRO_BATCH,
        selector="student_entropy",
    )
    train(inputs, 2, tmp_path, vocag_selector="student_entropy", **TENSOR)
    require_equal(tmp_path, inputs, expected)
    with pytest.raises(AssertionError):
        require_equal(tmp_path, inputs, references[MICRO_BATCH][0])


def require_equal(folder, inputs, expected):
    """Compare a job's gradients with those of one process."""
    found = merged(folder, "gradients", inputs.student)
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * scale, msg=name)


def test_the_reference_is_the_plain_trainers_step(inputs, references, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from train_methods import Method, batch_loss

    rows = AlignedRows(
        StreamConfig(
            path=str(inputs.data),
            seq_length=SEQ_LENGTH,
            seed=1234,
            global_batch_size=GLOBAL_BATCH,
        )
    )
    student, teacher = (
        load_language_model(str(folder)) for folder in (inputs.student, inputs.teacher)
    )
    results = [
        batch_loss(Method(), student, teacher, rows.__getitems__([start, start + 1]), 0)
        for start in range(0, GLOBAL_BATCH, MICRO_BATCH)
    ]
    count = sum(int(result.count) for result in results)
    (sum(result.loss_sum for result in results) / count).backward()
    expected, _ = references[MICRO_BATCH]
    found = {name: parameter.grad for name, parameter in student.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_without_a_teacher_selectors_still_know_what_is_mapped(tmp_path, inputs):
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=MICRO_BATCH,
        selector="student_loss",
    )
    train(inputs, 1, tmp_path, vocag_selector="student_loss", vocag_teacher=None)
    require_equal(tmp_path, inputs, expected)


def test_references_differ_by_their_scope(references):
    # Otherwise the replicas' layouts would not show that the choice spans them.
    one, two = (reference[0] for reference in references.values())
    assert any(not torch.allclose(one[name], two[name], atol=1e-7) for name in one)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
def test_losses_are_those_of_transformers(tmp_path, tensor, pipeline):
    for family in FAMILIES:
        save_model(tmp_path / family, family)
    worker = ROOT / "tests/megatron/scores_worker.py"
    done = torchrun(tensor * pipeline, worker, tmp_path, tensor, pipeline)
    for family in FAMILIES:
        assert f"{family} " in done.stdout
