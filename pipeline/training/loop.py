"""Train a Hugging Face student on aligned rows, in one process or in many.

A step's kept losses are summed over micro-batches and processes before dividing by the kept tokens,
so these change only memory and time.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from pipeline.command_line.failures import hinted
from pipeline.command_line.folder_lock import hold_folder
from pipeline.command_line.pasted import pasted
from pipeline.losses.loss_checks import put_off
from pipeline.losses.loss_result import LossResult, metric_values
from pipeline.models.hf_models import read_shape, recompute_layers
from pipeline.models.weights import make_model, require_reloadable
from pipeline.streaming import AlignedRows, Rows, load_batches
from pipeline.training.checkpoint import (
    CHECKPOINT,
    load_checkpoint,
    save_checkpoint,
    teacher_digest,
)
from pipeline.training.config import TrainConfig
from pipeline.training.disk import DiskFullError
from pipeline.training.export import export_model
from pipeline.training.held_out import evaluate
from pipeline.training.log import RunLog
from pipeline.training.ranks import Ranks
from pipeline.training.run_opening import OpenedTraining, open_training
from pipeline.training.run_rows import open_rows
from pipeline.training.shortage import naming_memory
from pipeline.training.stopping import RunStoppedError, StopRequest, listening
from pipeline.training.update import check_gradient, divide_gradients, naming_step

OUTPUT_LOCK = ".train-lock"
"""The lock's name in a run's folder; it goes when the run ends."""

_MODEL = "model"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run's models and data; `guided` is wrapped for data parallelism.

    `teacher` is the digest that the first process keeps in checkpoints.
    """

    config: TrainConfig
    ranks: Ranks
    opened: OpenedTraining
    guided: nn.Module
    optimizer: torch.optim.Optimizer
    teacher: str = ""


def train(
    config: TrainConfig, ranks: Ranks | None = None, rows: AlignedRows | None = None
) -> dict[str, float]:
    """Train, or continue bit for bit from the last checkpoint; return the last measurements.

    There are none if the run was finished. All processes must call, with `ranks` of
    `joined_ranks`; None: this process alone. `rows` are those of `open_rows`, if already open.
    SIGTERM, SIGHUP or Ctrl-C finishes the step, writes a checkpoint and raises RunStoppedError.
    ValueError if the run's parts don't fit together, or another process writes to `output`.

    Example:
        >>> config = parse_config(["--config", "run.toml"])
        >>> train(config)["loss"]
        2.41
    """
    ranks = ranks or Ranks(torch.device(config.device or "cpu"))
    # Joined as text, for a Path would drop the folder of "./.train-lock".
    lock = hold_folder(os.path.join(config.output, OUTPUT_LOCK), str(config.output))
    kept = (config.output / CHECKPOINT).exists()
    if not kept:
        _require_no_model(config.output)
    with lock if ranks.is_first else nullcontext(), naming_memory(config, has_checkpoint=kept):
        with ranks.first_alone():
            rows = open_rows(config, ranks) if rows is None else rows
            run, step, values = _start(config, ranks, rows)
        return _train_from(run, step, values, RunLog(config, step) if ranks.is_first else None)


def train_step(run: Run, loader: Iterator[Rows], step: int) -> dict[str, float]:
    """Make one update, `step` from 0; return all processes' metrics.

    NonFiniteLossError leaves weights unchanged.
    """
    config, ranks, student = run.config, run.ranks, run.opened.student
    student.train()
    # So dropout needs no state in a checkpoint.
    torch.manual_seed(_seed(config.seed, step * ranks.count + ranks.number))
    with put_off() as checks:
        sums = _accumulate(run, loader, step)
    broken = checks.count(sums["loss"]).expand(2)
    added = ranks.add_up(torch.stack([*sums.values(), broken]))
    # Sums become means over the counted tokens; wrapped, gradients are means over processes.
    num_tokens = added[list(sums).index("loss"), 1].clamp_min(1)
    divide_gradients(student, (num_tokens / ranks.count).float())
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), config.clip_norm)
    # The host waits for the device here; with several processes, also to agree on stopping.
    told = torch.cat([added.flatten(), norm.double().view(1), *_scalars(checks.flags)]).cpu()
    numbers, (gradient_norm, *flags) = told[: added.numel()], told[added.numel() :].tolist()
    checks.refuse(flags, num_broken=float(numbers[-1]))
    check_gradient(gradient_norm)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    sums = dict(zip(sums, numbers.view(-1, 2)[:-1].unbind(), strict=True))
    return {
        "num_counted_tokens": float(sums["loss"][1]),
        "gradient_norm": gradient_norm,
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        **metric_values(sums),
    }


def _accumulate(run: Run, loader: Iterator[Rows], step: int) -> dict[str, Tensor]:
    """Add up gradients; return this process's summed metrics, fp64 [2]."""
    config, ranks = run.config, run.ranks
    sums: dict[str, Tensor] = {}
    num_own = config.global_batch_size // config.micro_batch_size // ranks.count
    for number in range(num_own):
        batch = next(loader).to(ranks.device, non_blocking=True)
        # Random choices differ between a step's micro-batches, in any process.
        draw = config.method.draw_of(step * num_own + number, ranks.number, ranks.count)
        with _synchronised(run.guided, number == num_own - 1):
            with torch.autocast(ranks.device.type, dtype=torch.bfloat16, enabled=config.bf16):
                loss: LossResult = run.guided(batch, teacher=run.opened.teacher, step=draw)
            cast(Any, loss.loss_sum).backward()
        own = torch.stack((loss.loss_sum.detach().double(), loss.num_tokens.double()))
        for name, value in {"loss": own, **loss.metrics}.items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def _scalars(flags: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(flags)).double()] if flags else []


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of a step, from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / (config.num_steps - config.warmup_steps)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    share = config.min_lr_fraction + (1 - config.min_lr_fraction) * left[config.schedule]
    return config.learning_rate * share


def read_so_far(rows: AlignedRows, consumed_samples: int) -> dict[str, float]:
    """Return `tokens/NAME` and `epochs/NAME` read of each dataset of a mixture.

    Tokens are estimated by the dataset's mean row.
    """
    told: dict[str, float] = {}
    if rows.layout.sources:
        counts = rows.plan.counts_before(consumed_samples)
        tokens = rows.plan.tokens_before(consumed_samples)
        for source, count, num_tokens in zip(rows.plan.sources, counts, tokens, strict=True):
            told[f"tokens/{source.name}"] = num_tokens
            told[f"epochs/{source.name}"] = count / source.num_rows
    return told


def _start(
    config: TrainConfig, ranks: Ranks, rows: AlignedRows
) -> tuple[Run, int, dict[str, float]]:
    opened = open_training(
        rows,
        _first_student(config, ranks.device),
        config.method,
        heldout=config.heldout_sets,
        allow_untrained_teacher=config.allow_untrained_teacher,
        teacher_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        group=ranks.group,
        device=ranks.device,
        with_tokenizer=ranks.is_first,
    )
    student = opened.student
    # Only layers are compiled or recomputed: the loss is outside.
    if config.gradient_checkpointing:
        recompute_layers(student)
    if config.compile:
        cast(Any, student.base_model).compile()
    optimizer = _optimizer(student, config)
    # Now, not at a checkpoint that a signal asks for: a large teacher takes seconds.
    teacher = teacher_digest(config) if ranks.is_first else ""
    step, values = load_checkpoint(config, opened.rows, student, optimizer, teacher)
    return Run(config, ranks, opened, opened.guided, optimizer, teacher), step, values


def _require_no_model(output: Path) -> None:
    model = output / _MODEL
    if model.exists():
        error = ValueError(
            f"{model} is there without the checkpoint of its run, and a new one would replace it: "
            "move it away, or give another output="
        )
        raise hinted(error, f"output={pasted(f'{output}-2')}")


def _first_student(config: TrainConfig, device: torch.device) -> str | PreTrainedModel:
    if not config.random_init:
        return config.student
    torch.manual_seed(config.seed)
    # In fp32 from the start: rounded buffers would stay so, and an export lacks them.
    student = make_model(read_shape(config.student), dtype=torch.float32)
    require_reloadable(student)
    return cast(PreTrainedModel, cast(Any, student).to(device))


def _train_from(
    run: Run, step: int, values: dict[str, float], log: RunLog | None
) -> dict[str, float]:
    config, ranks, opened = run.config, run.ranks, run.opened
    _require_one_step(step, ranks)
    run = _wrapped(run)
    loader = iter(
        load_batches(
            opened.rows,
            micro_batch_size=config.micro_batch_size,
            replica=ranks.number,
            num_replicas=ranks.count,
            consumed_samples=step * config.global_batch_size,
            num_workers=config.workers,
            pin_memory=ranks.device.type == "cuda",
        )
    )
    values = _make_up(run, step, values, log) if step else {}
    with listening() as request:
        step, made = _make_steps(run, loader, step, log, request)
    if log is not None:
        log.close()
    if step < config.last_step:
        raise RunStoppedError(step, request.signal_number)
    return made or values


def _make_up(run: Run, step: int, values: dict[str, float], log: RunLog | None) -> dict[str, float]:
    """Make what a kill after a step's checkpoint has prevented: its model, and its log's line."""
    config, ranks, opened = run.config, run.ranks, run.opened
    name = _model_of(config, step)
    if log is not None and name and not (config.output / name).exists():
        export_model(opened.student, opened.tokenizer, config.output / name)
    if not ranks.any(log is not None and log.step < step):
        return {}
    if _measures(config, step):
        values |= evaluate(config, opened.student, opened.heldout, ranks)
    values |= read_so_far(opened.rows, step * config.global_batch_size)
    if log is not None and values:  # older checkpoints have none
        log.write(step, values)
    return values


def _make_steps(
    run: Run, loader: Iterator[Rows], step: int, log: RunLog | None, request: StopRequest
) -> tuple[int, dict[str, float]]:
    """Return the step reached and the last values."""
    config, opened, values = run.config, run.opened, dict[str, float]()
    stops = False
    while step < config.last_step and not stops:
        for group in run.optimizer.param_groups:
            group["lr"] = rate = learning_rate(config, step)
        started = time.perf_counter()
        with naming_step(step, config.global_batch_size, rate):
            values = train_step(run, loader, step)
        values["seconds"] = time.perf_counter() - started
        step += 1
        stops = _stops(run, request)
        is_last, kept = stops or step == config.last_step, False
        if log is not None and (is_last or _is_due(step, config.checkpoint_every)):
            # Before measuring, which may fail.
            kept = _keep_checkpoint(run, step, values, is_last=is_last)
        if _measures(config, step):
            values |= evaluate(config, opened.student, opened.heldout, run.ranks)
            stops = stops or _stops(run, request)
            if log is not None and stops and not kept:
                _keep_checkpoint(run, step, values, is_last=True)
        values |= read_so_far(opened.rows, step * config.global_batch_size)
        if log is not None:
            log.write(step, values)
            _keep_model(run, step, is_last=stops or step == config.last_step)
    return step, values


def _stops(run: Run, request: StopRequest) -> bool:
    return run.ranks.any(request.signal_number is not None)


def _measures(config: TrainConfig, step: int) -> bool:
    return step == config.num_steps or _is_due(step, config.evaluate_every)


def _keep_checkpoint(run: Run, step: int, values: Mapping[str, float], *, is_last: bool) -> bool:
    """Write a checkpoint; False if there is no room."""
    config, rows, student = run.config, run.opened.rows, run.opened.student
    with _going_on(step, unless=is_last):
        save_checkpoint(config, rows, student, run.optimizer, step, values, run.teacher)
        return True
    return False


def _keep_model(run: Run, step: int, *, is_last: bool) -> None:
    """Export a model if it is due."""
    name = _model_of(run.config, step)
    if name:
        with _going_on(step, unless=is_last):
            export_model(run.opened.student, run.opened.tokenizer, run.config.output / name)


def _model_of(config: TrainConfig, step: int) -> str:
    """Return the folder in which a step's model is kept; "" if it isn't."""
    if step == config.num_steps:
        return _MODEL
    return f"step-{step:06d}" if _is_due(step, config.export_every) else ""


@contextmanager
def _going_on(step: int, *, unless: bool) -> Iterator[None]:
    """Let a full disk end the run only at its last save."""
    try:
        yield
    except DiskFullError as error:
        if unless:
            raise
        logger.warning("step %d: %s; the run goes on, and what it kept before stays", step, error)


def _optimizer(student: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    parameters = [p for p in student.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # Fused is one pass over the weights instead of ten. A checkpoint's own choice wins.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def _wrapped(run: Run) -> Run:
    if run.ranks.count == 1:
        return run
    device = run.ranks.device
    devices = [device] if device.type == "cuda" else None
    shape = run.opened.student.config
    wrapped = DistributedDataParallel(
        run.guided,
        device_ids=devices,
        # Views of the buckets, so that gradients take 4 bytes a weight and not 8.
        gradient_as_bucket_view=True,
        # Text doesn't reach a multimodal model's other parts.
        find_unused_parameters=shape.get_text_config(decoder=True) is not shape,
    )
    return replace(run, guided=wrapped)


def _require_one_step(step: int, ranks: Ranks) -> None:
    ahead = torch.tensor([step, step * step], dtype=torch.float64, device=ranks.device)
    total, squares = ranks.add_up(ahead).tolist()
    if squares * ranks.count != total * total:
        raise ValueError(
            f"process {ranks.number} found a checkpoint of step {step}, others of another: "
            "output= must be one folder that all processes see"
        )


def _synchronised(guided: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if is_last or not isinstance(guided, DistributedDataParallel):
        return nullcontext()
    return cast(AbstractContextManager[None], guided.no_sync())


def _seed(seed: int, draw: int) -> int:
    """The run's seed in the upper bits if it fits."""
    joined = (seed << 40) + draw
    if -(2**63) <= joined < 2**64:
        return joined
    return int.from_bytes(sha256(f"{seed} {draw}".encode()).digest()[:8])


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
