"""Predict a run's memory, disk and hours before it starts.

Memory is counted by running the student's own code on fake tensors, which have shapes and no
values, and adding up what it saves for the gradient. For TinyLlama's shape, four rows of 2,048 and
--bf16 that gives 38 GiB; an H200 used at most 37.1.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.models.hf_models import recompute_layers
from pipeline.models.weights import make_model
from pipeline.training.config import TrainConfig

# Three chunks, of logits and values made from them, exist at one time (pipeline.losses).
_LOGITS_BYTES = 3 * 4 * 2**25
# Of the matmul rate that a step's 6 operations per weight and token reach: 0.38 of an H200's by a
# plain loop of transformers, 1.1 B parameters in bf16.
_SHARE_OF_MATMUL = 0.35


@dataclass(frozen=True)
class RunMemory:
    """Bytes that a run holds on its device at one time.

    Attributes:
        state: weights, gradients and AdamW's two moments, in fp32.
        activations: saved by the student's layers for a micro-batch's gradient.
        logits: chunks of logits.
        teacher: a running teacher's weights and pass.
    """

    state: int
    activations: int
    logits: int
    teacher: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.activations + self.logits + self.teacher


def fake_model(shape: PretrainedConfig) -> PreTrainedModel:
    """Make a model of fake tensors; call it inside the `FakeTensorMode` that uses it."""
    # Rows of one document cost as much as packed rows, without transformers' mask.
    return make_model(shape, attn_implementation="sdpa")


def count_memory(
    config: TrainConfig, student: PretrainedConfig, teacher: PretrainedConfig | None, length: int
) -> RunMemory:
    """Return a run's memory on its device.

    Args:
        config: of the run.
        student: the shape of the student.
        teacher: the shape of a running teacher, or None.
        length: teacher tokens of a row.
    """
    with FakeTensorMode():
        model = fake_model(student)
        weights = sum(weight.numel() for weight in model.parameters())
        activations = _saved_bytes(config, model)
        passing = 0 if teacher is None else _teacher_bytes(config, fake_model(teacher), length)
    return RunMemory(16 * weights, activations, _LOGITS_BYTES, passing)


def count_weights(shape: PretrainedConfig) -> int:
    """Count the weights of a model's shape without making one."""
    with FakeTensorMode():
        return sum(weight.numel() for weight in fake_model(shape).parameters())


def count_operations(config: TrainConfig, num_weights: int, teacher_weights: int = 0) -> float:
    """Operations of a step: 6 per weight and token, or 8 if layers run twice.

    A running teacher's pass adds 2. Attention isn't counted: documents are short.
    """
    tokens = config.global_batch_size * config.seq_length
    return tokens * (
        (8 if config.gradient_checkpointing else 6) * num_weights + 2 * teacher_weights
    )


def measure_matmul(device: torch.device, dtype: torch.dtype, size: int = 0) -> float:
    """Measure operations per second of large products on a device, in tenths of a second."""
    size = size or (8192 if device.type == "cuda" else 1024)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = _timed(lambda: left @ right, device)
    return 2 * size**3 / seconds


def step_seconds(operations: float, rate: float) -> float:
    """Seconds of a step on a device with this rate of large products."""
    return operations / (rate * _SHARE_OF_MATMUL)


def _saved_bytes(config: TrainConfig, model: PreTrainedModel) -> int:
    """Bytes saved by a micro-batch's forward pass, and by a recomputed layer."""
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    whole = _saved_by(config, model, weights)
    if not config.gradient_checkpointing:
        return whole
    recompute_layers(model)
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return _saved_by(config, model, weights) + whole // max(layers, 1)


def _saved_by(config: TrainConfig, model: PreTrainedModel, weights: set[int]) -> int:
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    model.train()
    ids = torch.zeros(config.micro_batch_size, config.seq_length, dtype=torch.int64)
    with (
        saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=config.bf16),
    ):
        model.base_model(input_ids=ids, use_cache=False)
    sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in saved.items()}
    return sum(size for place, size in sizes.items() if place not in weights)


def _teacher_bytes(config: TrainConfig, model: PreTrainedModel, length: int) -> int:
    """Bytes of a frozen teacher's weights, and of its widest layer's tensors in a pass."""
    shape = model.config.get_text_config(decoder=True)
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    width = 3 * (shape.hidden_size + inner)
    size = 2 if config.bf16 else 4
    weights = sum(weight.numel() for weight in model.parameters())
    return size * int(weights + config.micro_batch_size * length * width)


def _timed(work: Callable[[], object], device: torch.device, seconds: float = 0.2) -> float:
    """Return the seconds per call, averaged over the calls that fit."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    calls, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        work()
        wait()
        calls += 1
    return passed / calls
