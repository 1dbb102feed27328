"""`vocag train --dry-run`: does it fit, and how long will it take?"""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from pipeline.dataset.tokenizers import Side
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_short,
)
from pipeline.models.fit import find_fitting
from pipeline.models.hf_models import read_shape
from pipeline.models.running_teacher import require_model_room
from pipeline.models.weights import require_reloadable
from pipeline.packing.opening import OpenedRun
from pipeline.streaming import AlignedRows
from pipeline.training.checkpoint import CHECKPOINT
from pipeline.training.config import TrainConfig
from pipeline.training.held_out import open_heldout
from pipeline.training.log import LOG_FILE, WARM_STEPS, read_log
from pipeline.training.prediction import (
    RunMemory,
    count_active_weights,
    count_memory,
    count_operations,
    count_weights,
    fake_model,
    measure_matmul,
    step_seconds,
)
from pipeline.training.ranks import Ranks
from pipeline.training.shortage import smaller


def describe_run(config: TrainConfig, ranks: Ranks, rows: AlignedRows) -> Iterator[str]:
    """Yield lines about a run's data, memory and time; loads no weights.

    ValueError for what the run would refuse, as far as no weights say so.
    """
    config.kind.require_rows(config.method, rows)
    measured = open_heldout(config.heldout_sets, rows).values()
    read = config.num_steps * config.global_batch_size
    yield (
        f"rows        {format_count(read)} of {config.seq_length} student tokens, "
        f"{read / rows.samples_per_epoch:.2f} epochs of {config.data.path}"
    )
    own = config.global_batch_size // ranks.count
    yield (
        f"steps       {format_count(config.num_steps)} of "
        f"{format_plural(config.global_batch_size, 'row')}: "
        f"{own // config.micro_batch_size} micro-batches of {config.micro_batch_size} in "
        f"{'one process' if ranks.count == 1 else f'each of {ranks.count} processes'}"
    )
    student = _shape(config.student, rows.opened, "student", weightless=config.random_init)
    runs = config.served.by == "running" and config.teaching.teacher
    _require_fit(config.student, student, (rows, *measured), "student")
    teacher = None
    if runs:
        teacher = _shape(str(runs), rows.opened, "teacher")
        _require_fit(str(runs), teacher, (rows,), "teacher")
    memory = count_memory(config, student, teacher, rows.layout.teacher_seq_length)
    yield from _describe_memory(config, ranks.device, memory)
    weights = count_weights(student)
    kept = 12 * weights
    free = shutil.disk_usage(_existing(config.output)).free
    yield (
        f"disk        {format_bytes(kept)} a checkpoint, {format_bytes(4 * weights)} a model; "
        f"{format_bytes(free)} are free in {config.output}"
    )
    if free < 2 * kept + 4 * weights:  # a checkpoint is written next to the one that it replaces
        yield f"WARNING     two checkpoints and a model need {format_bytes(2 * kept + 4 * weights)}"
    yield _describe_time(config, ranks, student, teacher)


def _describe_memory(config: TrainConfig, device: torch.device, memory: RunMemory) -> Iterator[str]:
    parts = {
        "weights, gradients and AdamW": memory.state,
        "activations": memory.activations,
        "logits": memory.logits,
        "teacher": memory.teacher,
    }
    listed = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)
    yield f"memory      {format_bytes(memory.total)}: {listed}"
    there = _device_memory(device)
    # CUDA's own memory, and memory that the allocator can't use.
    fits = 1.05 * memory.total + 1e9 < there
    advice = smaller(config, has_checkpoint=(config.output / CHECKPOINT).exists())
    yield (
        f"            {device} has {format_bytes(there)}: "
        f"{'it fits' if fits else f'too little; try {advice}'}"
    )


def _describe_time(
    config: TrainConfig, ranks: Ranks, student: PretrainedConfig, teacher: PretrainedConfig | None
) -> str:
    if (own := _own_seconds(config)) is not None:
        seconds, how = own, f"{own:.3g} s a step in its log so far"
    else:
        half = config.bf16 and ranks.device.type == "cuda"
        rate = measure_matmul(ranks.device, torch.bfloat16 if half else torch.float32)
        teaching = count_active_weights(teacher) if teacher else 0
        operations = count_operations(config, count_active_weights(student), teaching) / ranks.count
        seconds = step_seconds(operations, rate)
        how = f"35 % of {format_short(rate)}FLOP/s, which large products reach here: a rough guess"
    tokens = config.global_batch_size * config.seq_length / seconds
    whole = format_duration(seconds * config.num_steps)
    return f"time        {whole}, {format_short(tokens)} student tokens/s ({how})"


def _own_seconds(config: TrainConfig) -> float | None:
    steps = read_log(config.output / LOG_FILE)
    seconds = [step["seconds"] for step in steps[WARM_STEPS:] if "seconds" in step]
    return median(seconds) if seconds else None


def _shape(
    source: str, opened: OpenedRun, side: Side, *, weightless: bool = False
) -> PretrainedConfig:
    """Return a model's configuration; `weightless` needs no more of it."""
    if weightless:
        return read_shape(source, side=side)
    return read_shape(str(find_fitting(source, opened.dataset, side=side).path), side=side)


def _require_fit(
    source: str, shape: PretrainedConfig, read: Iterable[AlignedRows], side: Side
) -> None:
    """Refuse a model as the run would, by what is known without its numbers."""
    with FakeTensorMode():
        model = fake_model(shape)
    if side == "student":
        require_reloadable(model)
    for rows in read:
        require_model_room(model, rows.opened, rows.rules, source, side=side)


def _device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
