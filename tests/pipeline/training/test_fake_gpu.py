"""A whole step of `vocag train` on a GPU that isn't there: devices, dtypes, kernels and waits."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.methods.method import Method
from pipeline.models.packed_check import keep_documents_apart
from pipeline.scoring.teaching import ONLINE_TOP_K, Teaching
from pipeline.streaming import AlignedRows, Reading, load_batches
from pipeline.streaming.vocabularies import vocabulary_map
from pipeline.training.config import TrainConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.loop import Run, train_step
from pipeline.training.ranks import Ranks
from pipeline.training.run_opening import OpenedTraining
from schemas.distribution_rule import EntryShape
from tests.support.datasets import build_dataset, make_texts
from tests.support.fake_gpu import CUDA, FakeGpu

LAYERS, MICRO_BATCHES = 2, 2
# In a micro-batch: which tokens have a gradient, where a share is kept; and what a running
# teacher's next tokens need, which this machine puts into the student's vocabulary.
BY_METHOD = {
    "full": {},
    "teacher": {"_LinearCrossEntropy.backward nonzero": 1},
    "alm": {},
    "distill": {
        "_RunningTop.add nonzero": 1,
        "_RunningTop.tell_apart nonzero": 2,
        "ask_entries copies to the host": 3,
        "ask_entries copies to the device": 1,
        "ask_distributions.<locals>.<genexpr> copies to the device": 3,
    },
}
BY_METHOD["draws"] = BY_METHOD["distill"] | {
    "ask_entries copies to the device": 2,
    "TailDraws.draw nonzero": 1,
    "TailDraws.draw _unique2": 1,
    "_Tail.of_blocks unique_consecutive": 2,
    "_Tail.of_blocks tolist": 4,
}
# All numbers of a step are read together.
IN_A_STEP = {"train_step copies to the host": 1}


def make_model(vocab_size, dtype):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(vocab_size)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes, **heads)).to(dtype)
    keep_documents_apart(model)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake_gpu") / "data"
    build_dataset(folder, make_texts(40), num_shards=1)
    return folder


@pytest.mark.parametrize("method", BY_METHOD)
def test_a_step_stays_on_its_device_and_attends_by_one_kernel(folder, method):
    student, teacher = make_model(400, torch.float32), make_model(480, torch.bfloat16)
    config = TrainConfig(
        data=Reading(str(folder)),
        student="student",
        teaching=Teaching(teacher=None if method == "full" else "teacher"),
        output=folder / "unused",
        method=Method(name="distill" if method == "draws" else method),
        seq_length=64,
        global_batch_size=2 * MICRO_BATCHES,
        micro_batch_size=2,
        bf16=True,
    )
    rows = AlignedRows(config.stream)
    known = vocabulary_map(rows) if method in ("distill", "draws") else None
    asked = EntryShape(ONLINE_TOP_K + 1, 3 if method == "draws" else 0)
    guided = GuidedStudent(student, config.method, vocabulary_map=known, asked=asked)
    with FakeGpu() as gpu:
        optimizer = torch.optim.AdamW(gpu.move(student).parameters())
        opened = OpenedTraining(rows, guided, gpu.move(teacher))
        run = Run(config, Ranks(CUDA), opened, guided, optimizer)
        batches = load_batches(rows, micro_batch_size=2, pin_memory=True)
        done = train_step(run, iter(batches), 0)
        assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
    assert math.isfinite(done["loss"])
    assert done["gradient_norm"] > 0
    # Weights in fp32 and the last norm's states, too, are rounded before they meet.
    assert set(gpu.products) == {torch.bfloat16}
    # The student's and the teacher's layers; under autocast, too, in 16 bits.
    models = 1 if method == "full" else 2
    assert gpu.operations["_varlen_attn"] == models * LAYERS * MICRO_BATCHES
    assert gpu.operations["_varlen_attn_backward"] == LAYERS * MICRO_BATCHES
    waits = {place: count * MICRO_BATCHES for place, count in BY_METHOD[method].items()}
    if known is not None:  # cells, in a run's first step
        waits["_place copies to the device"] = 5
    assert dict(gpu.waits) == waits | IN_A_STEP
