"""Layers of Transformer Engine's signatures, from a stand-in, with our attention between them."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_plugin.export_hf import export_student
from megatron_plugin.models.weights import open_weights
from tests.megatron_plugin.launch import ROOT
from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SEQ_LENGTH,
    TENSOR,
    make_inputs,
    merged,
    require_equal,
    train,
)

pytestmark = pytest.mark.slow
STAND_INS = ROOT / "tests/megatron_plugin/stand_ins"


def test_its_layers_learn_and_export_what_ours_do(tmp_path):
    """Two ranks share layers and places; the teacher's layers are Megatron's own."""
    inputs = make_inputs(tmp_path)
    expected, _ = reference_gradients(
        inputs,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH,
        rows_per_choice=MICRO_BATCH,
    )
    done = train(
        inputs,
        2,
        tmp_path / "dump",
        environment={"PYTHONPATH": f"{STAND_INS}:{ROOT}"},
        sequence_parallel="",
        no_gradient_accumulation_fusion="",
        save=tmp_path / "checkpoints",
        save_interval=1,
        **TENSOR,
    )
    attention = "torch's scaled_dot_product_attention, document by document"
    said = done.stdout + done.stderr
    assert f"the student: Transformer Engine 2.6.0's layers, {attention}" in said
    assert f"the teacher: Megatron's own layers, {attention}" in said
    require_equal(tmp_path / "dump", inputs, expected)
    export_student(tmp_path / "checkpoints", tmp_path / "exported", with_tokenizer=False)
    exported = open_weights(str(tmp_path / "exported"))
    held = merged(tmp_path / "dump", "weights", inputs.student)
    assert held.keys() == exported.tensors.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, exported.get(name)), name
