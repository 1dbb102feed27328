"""Predict a run's memory, disk and hours before it starts.

The student runs on fake tensors; what it saves for the gradient is added up. For TinyLlama's shape,
four rows of 2,048 and --bf16 this gives 38 GiB; an H200 used 37.1.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pipeline.models.devices import lacks_memory
from pipeline.models.hf_models import recompute_layers
from pipeline.models.weights import ForeignCodeError, make_model
from pipeline.training.config import TrainConfig

# Three chunks of logits, and values made from them, exist at a time (pipeline.losses).
_LOGITS_BYTES = 3 * 4
_CHUNK_LOGITS = 2**25
# A step's rate as a share of matmul's: 0.38 on an H200 in a plain loop of transformers, with 1.1 B
# parameters in bf16.
_SHARE_OF_MATMUL = 0.35
_TIMED_SECONDS = 0.2


@dataclass(frozen=True)
class RunMemory:
    """Bytes that a run holds on its device at one time.

    `state` is weights, gradients and AdamW's moments, in fp32; `teacher` includes a pass.
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
    """Make a model inside a `FakeTensorMode`, in fp32, as a run loads it.

    ValueError if its code needs the numbers.
    """
    # Rows of one document cost as much as packed rows.
    try:
        with no_init_weights():  # torch looks at some numbers that it draws, and there are none
            model = make_model(shape, dtype=torch.float32)
    except ForeignCodeError as error:
        if isinstance(error.__cause__, RuntimeError):  # such as torch's, of a converted fake tensor
            raise _uncounted("weights", shape.model_type, error.__cause__) from error
        raise
    cast(Any, model).tie_weights()
    return model


def count_memory(
    config: TrainConfig, student: PretrainedConfig, teacher: PretrainedConfig | None, length: int
) -> RunMemory:
    """Count a run's memory; `length` is a row's teacher tokens."""
    with FakeTensorMode():
        model = fake_model(student)
        weights = sum(weight.numel() for weight in model.parameters())
        activations = _saved_bytes(config, model)
        passing = 0 if teacher is None else _teacher_bytes(config, fake_model(teacher), length)
    read = ((student, config.seq_length), (teacher, length))
    largest = max(
        config.micro_batch_size * tokens * shape.get_text_config(decoder=True).vocab_size
        for shape, tokens in read
        if shape is not None
    )
    logits = _LOGITS_BYTES * min(largest, _CHUNK_LOGITS)
    return RunMemory(16 * weights, activations, logits, passing)


def count_weights(shape: PretrainedConfig) -> int:
    """Count the weights of a model's shape without making one."""
    with FakeTensorMode():
        return sum(weight.numel() for weight in fake_model(shape).parameters())


def count_active_weights(shape: PretrainedConfig) -> int:
    """Count the weights that a token meets: of each layer's experts only those chosen for it."""
    chosen = getattr(shape.get_text_config(decoder=True), "num_experts_per_tok", None)
    with FakeTensorMode():
        return sum(
            weight.numel() * min(chosen, len(weight)) // len(weight)
            if chosen and ".experts." in name and weight.dim() > 1
            else weight.numel()
            for name, weight in fake_model(shape).named_parameters()
        )


def count_operations(config: TrainConfig, num_weights: int, teacher_weights: int = 0) -> float:
    """Operations of a step: 6 per active weight and token, 8 if layers run twice.

    A teacher's pass adds 2. Attention isn't counted: documents are short.
    """
    tokens = config.global_batch_size * config.seq_length
    return tokens * (
        (8 if config.gradient_checkpointing else 6) * num_weights + 2 * teacher_weights
    )


def measure_matmul(device: torch.device, dtype: torch.dtype, size: int = 0) -> float:
    """Measure a device's operations per second in large products."""
    size = size or (8192 if device.type == "cuda" else 1024)
    # Random, as a run's numbers are: an H200 multiplies zeros 13 % faster.
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = _timed(lambda: left @ right, device)
    return 2 * size**3 / seconds


def step_seconds(operations: float, rate: float) -> float:
    """Seconds of a step, given the rate of large products."""
    return operations / (rate * _SHARE_OF_MATMUL)


def _saved_bytes(config: TrainConfig, model: PreTrainedModel) -> int:
    """Bytes saved for the gradient; with those of a recomputed layer, or of rounded weights."""
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    whole = _saved_by(config, model, weights)
    if not config.gradient_checkpointing:
        return whole
    recompute_layers(model)
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    more = max(whole // max(layers, 1), _rounded_bytes(model) if config.bf16 else 0)
    return _saved_by(config, model, weights) + more


def _rounded_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights' copies that autocast keeps until the forward pass has ended."""
    tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
    whole = {id(table) for table in tables}
    weights = model.base_model.parameters()
    return 2 * sum(each.numel() for each in weights if each.dim() > 1 and id(each) not in whole)


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
        try:
            model.base_model(input_ids=ids, use_cache=False)
        except Exception as error:  # of code that looks at numbers, and there are none
            if lacks_memory(error):
                raise  # known to commands
            raise _uncounted("activations", type(model).__name__, error) from error
    sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in saved.items()}
    return sum(size for place, size in sizes.items() if place not in weights)


def _uncounted(what: str, name: str, error: BaseException) -> ValueError:
    why = f"{type(error).__name__}: {shorten(str(error), 200)}"
    return ValueError(
        f"--dry-run counts the {what} of a model without its numbers, which the code of {name} "
        f"doesn't allow with torch {torch.__version__} and transformers "
        f"{transformers.__version__} ({why}): leave out --dry-run"
    )


def _teacher_bytes(config: TrainConfig, model: PreTrainedModel, length: int) -> int:
    """Bytes of weights, and of the widest layer's tensors."""
    shape = model.config.get_text_config(decoder=True)
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    widest = max(inner) if isinstance(inner, (list, tuple)) else inner  # Gemma 3n: of each layer
    width = 3 * (shape.hidden_size + widest)
    size = 2 if config.bf16 else 4
    weights = sum(weight.numel() for weight in model.parameters())
    return size * int(weights + config.micro_batch_size * length * width)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    calls, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < _TIMED_SECONDS:
        work()
        wait()
        calls += 1
    return passed / calls
