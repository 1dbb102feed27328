"""Chats in the real trainer: every layout takes the step that one process would take."""

import pytest

pytest.importorskip("megatron.core")

from pipeline.streaming import AlignedRows, StreamConfig
from tests.megatron_plugin.models import save_model
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import (
    CONTEXT,
    GLOBAL_BATCH,
    PIPELINE,
    SEQ_LENGTH,
    Inputs,
    require_equal,
    train,
)
from tests.support.chats import align_chats_job, chat_tokenizer, said, user

pytestmark = pytest.mark.slow

_CHATS = [
    [m for k in range(1 + n % 3) for m in (user(f"{n} + {k}?"), said(f"It is {n + k}, naïve 😀."))]
    for n in range(60)
]
_TENSOR_TEACHER = {"vocag_teacher_world_size": 2, "vocag_teacher_tensor_model_parallel_size": 2}
# Student ranks and arguments, the teacher's, and the method.
LAYOUTS = {
    "pipeline, tensor": (4, PIPELINE, _TENSOR_TEACHER, {}),
    "context, colocated": (2, CONTEXT, {}, {}),
    "distill, context, colocated": (
        2,
        {**CONTEXT, "vocag_method": "distill", "vocag_top_k": 8, "vocag_draws": 3},
        {},
        {"name": "distill", "top_k": 8, "draws": 3},
    ),
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Chats in two templates, and two models of their vocabularies."""
    folder = tmp_path_factory.mktemp("chats")
    data, _ = align_chats_job(folder, _CHATS)
    for side, family, size in (("student", "qwen2_tied", 320), ("teacher", "llama_scaled", 512)):
        vocab_size = chat_tokenizer(size).vocab_size
        save_model(folder / f"{side}-model", family, vocab_size=vocab_size, seed=size)
    models = (folder / f"{side}-model" for side in ("student", "teacher"))
    return Inputs(data, data, *models)


def test_rows_hold_labels_that_nobody_learns(chats):
    rows = AlignedRows(StreamConfig(str(chats.data), seq_length=SEQ_LENGTH))
    masks = [rows[number]["loss_mask"] for number in range(GLOBAL_BATCH)]
    assert all(0 < int(mask.sum()) < SEQ_LENGTH // 2 for mask in masks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_gradients_are_those_of_one_process(tmp_path, chats, layout):
    num_ranks, student, teacher, method = LAYOUTS[layout]
    exported = {"NVTE_FLASH_ATTN": "0"}
    train(chats, num_ranks, tmp_path, environment=exported, **student, **teacher)
    require_equal(tmp_path, chats, reference_gradients(chats, **method))
