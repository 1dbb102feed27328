"""Predicted operations, memory and speed, each against something that counts them otherwise."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

pytest.importorskip("megatron.core")

from megatron_prediction import Plan, activation_bytes, operations, predict

from megatron_plugin.models.shape import shape_of_config
from tests.megatron_plugin.forked_ranks import ROOT, fork_ranks
from tests.megatron_plugin.models import FAMILIES, make_model, save_model

GIB = 2**30
# TinyLlama 1.1B and Mistral 7B.
STUDENT = shape_of_config(
    LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ).to_dict()
)
TEACHER = shape_of_config(
    MistralConfig(
        num_key_value_heads=8,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ).to_dict()
)
PLAN = Plan("student", "teacher")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family):
    model = make_model(family, num_hidden_layers=3)
    shape = shape_of_config(model.config.to_dict())
    assert shape.num_parameters == model.num_parameters()


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_torch_counts(family):
    from torch.utils.flop_counter import FlopCounterMode

    model = make_model(family, num_hidden_layers=3)
    model.set_attn_implementation("eager")
    if "moe" in family:
        model.set_experts_implementation("eager")

    def counted(length):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
        return counter.get_total_flops()

    shape = shape_of_config(model.config.to_dict())
    by_square = (counted(64) - 2 * counted(32)) / (64**2 - 2 * 32**2)
    by_token = counted(64) / 64 - by_square * 64
    # Rotary angles are products, too, as many for each model.
    assert by_token == pytest.approx(2 * shape.weights_per_token, rel=0.01)
    # The future is counted as well, which causal attention doesn't compute.
    plan = replace(PLAN, document_tokens=64)
    assert operations(plan, shape) == pytest.approx(by_token + by_square / 2 * 64, rel=0.01)


@pytest.mark.slow
def test_activations_are_what_a_layer_keeps(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 8}
    for layers in (2, 4):
        model = save_model(tmp_path / str(layers), "llama", num_hidden_layers=layers, **sizes)
    folders = [tmp_path / "2", tmp_path / "4"]
    done = fork_ranks(1, "tests.megatron_plugin.kept_worker", *folders)
    kept = [int(each.split()[0]) for each in done.stdout.split("kept ")[1:]]
    # Two layers more; the CPU's norm keeps fp32 copies, left out, in place of its input.
    expected = activation_bytes(shape_of_config(model.config.to_dict()))
    assert (kept[1] - kept[0]) // 2 + 2 * 2 * sizes["hidden_size"] == expected


def test_the_papers_recipe_by_hand():
    """32 GPUs, 1,024 rows of 2,048, attention left out: the arithmetic, step by step."""
    found = predict(replace(PLAN, document_tokens=0), STUDENT, TEACHER)
    tokens = 1024 * 2048
    student = 22 * (2048 * 2048 * 2 + 2048 * 256 * 2 + 3 * 2048 * 5632) + 32000 * 2048
    teacher = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 32000 * 4096
    seconds = [6 * student * tokens / (32 * 989e12 * 0.35), 2 * teacher * tokens / (16 * 989e12)]
    assert found.student_seconds == pytest.approx(seconds[0])
    assert found.teacher_seconds == pytest.approx(seconds[1])
    assert found.step_seconds == pytest.approx(sum(seconds))
    assert found.tokens_per_second == pytest.approx(tokens / sum(seconds))
    assert found.hours == pytest.approx(15e9 / found.tokens_per_second / 3600)
    parameters = student + 32000 * 2048 + 22 * 2 * 2048 + 2048
    layer = 2 * (4 * 2048 + 4 * 2048 + 3 * 256 + 3 * 5632) + 4 * 32
    of_student = 18 * parameters + 8 * 2048 * 22 * layer + 12 * 2**25
    weights = 2 * (teacher + 32000 * 4096 + 32 * 2 * 4096 + 4096)
    of_teacher = weights + 8 * 2048 * 2 * 3 * (14336 + 4096) + 12 * 2**25
    assert found.student_gib == pytest.approx((of_student + of_teacher) / GIB + 4)


def test_worlds_overlap_and_sharing_saves():
    apart = replace(PLAN, teacher_gpus=16)
    found, colocated = predict(apart, STUDENT, TEACHER), predict(PLAN, STUDENT, TEACHER)
    assert found.step_seconds == max(found.student_seconds, found.teacher_seconds)
    assert found.student_gib < colocated.student_gib
    assert predict(PLAN, STUDENT, None).teacher_seconds == 0
    shared = predict(replace(PLAN, distributed_optimizer=True), STUDENT, TEACHER)
    saved = 12 * STUDENT.num_parameters * 31 / 32 / GIB
    assert colocated.student_gib - shared.student_gib == pytest.approx(saved)
    pipeline = predict(replace(apart, teacher_pipeline_parallel=4), STUDENT, TEACHER)
    # 32 layers in stages of 8, the output layer in the last; each copy's 256 rows of a step are 32
    # micro-batches, and three more pass until the last stage has worked.
    output = 32000 / (2 * 4096 + 2 * 1024 + 3 * 14336)
    longer = (8 + output) / ((32 + output) / 4) * 35 / 32
    assert pipeline.teacher_seconds == pytest.approx(found.teacher_seconds * longer)
    with pytest.raises(ValueError, match="1024 rows, which 10 student replicas"):
        predict(replace(PLAN, gpus=30, teacher_gpus=20), STUDENT, TEACHER)


# GPU, GPUs for the student, for the teacher, rows of a step.
MANUAL_PLANS = [
    ("h100", 32, 0, 1024),
    ("h100", 10, 20, 960),
    ("h100", 16, 16, 1024),
    ("h100", 8, 0, 1024),
    ("h200", 8, 0, 1024),
    ("a100", 32, 0, 1024),
]


def manual_row(gpu, student_gpus, teacher_gpus, rows):
    """Return a row of the manual's table."""
    plan = replace(
        PLAN,
        gpu=gpu,
        gpus=student_gpus + teacher_gpus,
        teacher_gpus=teacher_gpus,
        global_batch_size=rows,
    )
    found = predict(plan, STUDENT, TEACHER)
    where = f"{student_gpus} + {teacher_gpus}" if teacher_gpus else "colocated"
    cells = [f"{plan.gpus} × {gpu.upper()}", where, f"{rows:,}", f"{found.step_seconds:.1f}"]
    cells += [f"{found.tokens_per_second / 1000:,.0f} k", f"{found.hours:.1f} h"]
    cells += [f"{found.student_gib:.0f}", f"{found.teacher_gib:.0f}" if teacher_gpus else "–"]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("plan", MANUAL_PLANS)
def test_the_manuals_table_is_what_is_predicted(plan):
    assert manual_row(*plan) in (ROOT / "docs/guides/megatron.md").read_text().splitlines()
