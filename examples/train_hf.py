r"""Train a Hugging Face student on aligned rows, on one GPU or a CPU, by any method.

    python examples/train_hf.py --data aligned --teacher teacher/ --student student/ \
        --method teacher --output runs/teacher

The reference to read and to start from: plain PyTorch, one process. Rows are packed; attention
stays within each document by a mask (`pipeline.hf_models`), so that any model of transformers runs,
also without flash attention. Kept losses are summed over a step's micro-batches and divided by the
tokens kept, so accumulation changes nothing but memory. A run that is started again goes on from
its last checkpoint, bit for bit.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from train_config import TrainConfig, parse_config
from train_methods import NEED_TEACHER, ONE_VOCABULARY, batch_loss, teacher_losses
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.cross_entropy import linear_cross_entropy
from pipeline.guidance import aggregate_teacher_losses, metric_values
from pipeline.hf_models import hidden_states, load_language_model, output_weight
from pipeline.streaming import AlignedRows, Rows, StreamConfig, StreamState, load_batches

EVALUATION_ROWS = 8


def train(config: TrainConfig) -> dict[str, float]:
    """Train, or go on training; return the last measurements.

    Raises:
        ValueError: data, models, checkpoint and options that don't fit together.
    """
    rows = _open_rows(config)
    student = load_student(config)
    teacher = _load_teacher(config, rows)
    optimizer = _optimizer(student, config)
    step = _restore(config, rows, student, optimizer)
    log = RunLog(config, step)
    loader = iter(
        load_batches(
            rows,
            micro_batch_size=config.micro_batch_size,
            consumed_samples=step * config.global_batch_size,
        )
    )
    values: dict[str, float] = {}
    last = min(config.num_steps, config.exit_after or config.num_steps)
    while step < last:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        started = time.perf_counter()
        values = train_step(config, student, teacher, optimizer, loader, step)
        values["seconds"] = time.perf_counter() - started
        step += 1
        if config.heldout and (step == config.num_steps or _is_due(step, config.evaluate_every)):
            values["heldout_bits_per_byte"] = bits_per_byte(config, student)
        log.write(step, values)
        if step == last or _is_due(step, config.checkpoint_every):
            _save(config, rows, student, optimizer, step)
    if step == config.num_steps:
        student.save_pretrained(config.output / "model")
    return values


def train_step(
    config: TrainConfig,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    loader: Iterator[Rows],
    step: int,
) -> dict[str, float]:
    """Make one update from a global batch; return its metrics."""
    student.train()
    total, count = 0.0, 0
    metrics: dict[str, Tensor] = {}
    num_micro_batches = config.global_batch_size // config.micro_batch_size
    for number in range(num_micro_batches):
        batch = next(loader).to(config.device)
        with _autocast(config):
            # Random choices must differ between the micro-batches of a step, too.
            draw = step * num_micro_batches + number
            result = batch_loss(config.method, student, teacher, batch, draw)
        result.loss_sum.backward()
        total += float(result.loss_sum.detach())
        count += int(result.count)
        for name, value in result.metrics.items():
            metrics[name] = metrics.get(name, torch.zeros_like(value)) + value
    for parameter in student.parameters():
        if parameter.grad is not None:
            parameter.grad /= max(count, 1)
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), config.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "loss": total / max(count, 1),
        "num_counted_tokens": float(count),
        "gradient_norm": float(norm),
        "learning_rate": optimizer.param_groups[0]["lr"],
        **metric_values(metrics),
    }


@torch.inference_mode()
def bits_per_byte(config: TrainConfig, student: PreTrainedModel) -> float:
    """Return the student's mean code length of the held-out text and its documents' ends.

    Comparable between any tokenizers: the sum over all tokens, by the bytes of the text.
    """
    student.eval()
    assert config.heldout is not None
    rows = AlignedRows(
        StreamConfig(
            path=config.heldout,
            seq_length=config.seq_length,
            student_bos=config.student_bos,
            student_eos=config.student_eos,
        )
    )
    if rows.plan.rules.student.first_token_id is None:
        raise ValueError(f"{config.heldout}: without a context token the first token has no loss")
    total = 0.0
    for start in range(0, len(rows), EVALUATION_ROWS):
        numbers = range(start, min(start + EVALUATION_ROWS, len(rows)))
        batch = rows.__getitems__(list(numbers)).to(config.device)
        with _autocast(config):
            hidden = hidden_states(
                student,
                batch["input_ids"],
                position_ids=batch["position_ids"],
                cu_seqlens=batch["cu_seqlens"],
            )
            scores = linear_cross_entropy(
                hidden,
                output_weight(student),
                batch["labels"].long(),
                loss_mask=batch["loss_mask"],
            )
        total += float(scores.losses.double().sum())
    return total / math.log(2) / rows.manifest.totals["num_text_bytes"]


def mean_teacher_loss(teacher: PreTrainedModel, batch: Rows) -> float:
    """Return the teacher's mean loss over the labels that it covers, nats; not over padding.

    A good model may find padding as unlikely as an untrained one finds everything.
    """
    guidance = aggregate_teacher_losses(
        teacher_losses(teacher, batch),
        batch["teacher_spans"],
        "mean",
        teacher_loss_mask=batch["teacher_position_ids"] > 0,
    )
    return float(guidance[batch["loss_mask"].bool()].nanmean())


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of a step: linear warm-up, then half a cosine."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / (config.num_steps - config.warmup_steps)
    share = config.min_lr_fraction + (1 - config.min_lr_fraction) * (
        0.5 * (1 + math.cos(math.pi * done))
    )
    return config.learning_rate * share


def load_student(config: TrainConfig) -> PreTrainedModel:
    """Return the student, fp32, on the run's device; the same weights for the same seed."""
    if config.random_init:
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.student))
        model = model.float()
        output_weight(model)
    else:
        model = load_language_model(config.student)
    return model.to(config.device)


class RunLog:
    """log.jsonl and, if wanted, TensorBoard; what a checkpoint does not know is dropped."""

    def __init__(self, config: TrainConfig, step: int) -> None:
        """Open the log of a run that stands at `step`."""
        self._path = config.output / "log.jsonl"
        config.output.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text("utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self._path.write_text("".join(line + "\n" for line in kept), "utf-8")
        self._board: Any = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(config.output), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add one step; NaN (nothing to average) is written as null."""
        record = {k: None if math.isnan(v) else v for k, v in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        shown = ("loss", "kept_fraction", "heldout_bits_per_byte", "seconds")
        parts = [f"{name} {values[name]:.4g}" for name in shown if name in values]
        print(f"step {step}: {', '.join(parts)}", flush=True)


def _open_rows(config: TrainConfig) -> AlignedRows:
    rows = AlignedRows(
        StreamConfig(
            path=config.data,
            seq_length=config.seq_length,
            seed=config.seed,
            global_batch_size=config.global_batch_size,
            num_epochs=config.num_epochs,
            teacher_losses=config.teacher_losses,
            student_bos=config.student_bos,
            student_eos=config.student_eos,
            teacher_context=config.teacher_context,
        )
    )
    needed = config.num_steps * config.global_batch_size
    if len(rows) < needed:
        raise ValueError(
            f"{config.num_steps} steps need {needed} rows, {config.num_epochs} epochs have "
            f"{len(rows)}: raise --num-epochs or lower --num-steps"
        )
    return rows


def _load_teacher(config: TrainConfig, rows: AlignedRows) -> PreTrainedModel | None:
    manifest, name = rows.manifest, config.method.name
    if name not in NEED_TEACHER or config.teacher_losses is not None:
        return None
    if name in ONE_VOCABULARY and manifest.student.sha256 != manifest.teacher.sha256:
        raise ValueError(
            f"--method {name} needs a teacher with the student's tokenizer, but {config.data} was "
            f"aligned with {manifest.teacher.source}: align with the student's as --teacher, too"
        )
    assert config.teacher is not None
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    teacher = load_language_model(config.teacher, dtype=dtype).to(config.device)
    vocab_size = output_weight(teacher).shape[0]
    if manifest.teacher.vocab_size > vocab_size:
        raise ValueError(
            f"the data has teacher tokens up to {manifest.teacher.vocab_size - 1}, "
            f"{config.teacher} knows {vocab_size}: align with the tokenizer of this teacher"
        )
    mean = mean_teacher_loss(teacher, rows.__getitems__([0]).to(config.device))
    if not mean < 0.9 * math.log(vocab_size):
        raise ValueError(
            f"{config.teacher} has a mean loss of {mean:.2f} nats, as if its weights had not been "
            f"loaded (chance is {math.log(vocab_size):.2f}): check the file"
        )
    return teacher.requires_grad_(False)


def _optimizer(student: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    parameters = list(student.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def _save(
    config: TrainConfig,
    rows: AlignedRows,
    student: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    checkpoint = {
        "step": step,
        "run": _run_identity(config),
        "data": asdict(rows.state(step * config.global_batch_size)),
        "student": student.state_dict(),
        "optimizer": optimizer.state_dict(),
        # Only a student with dropout draws while it trains.
        "random": torch.get_rng_state(),
    }
    temporary = config.output / "checkpoint.pt.tmp"
    torch.save(checkpoint, temporary)
    os.replace(temporary, config.output / "checkpoint.pt")


def _restore(
    config: TrainConfig,
    rows: AlignedRows,
    student: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Load the run's checkpoint where there is one; return the step to go on from."""
    path = config.output / "checkpoint.pt"
    if not path.exists():
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    now, then = _run_identity(config), checkpoint["run"]
    for name in now:
        if now[name] != then[name]:
            raise ValueError(
                f"{path} was made with {name} {then[name]}, this run has {now[name]}: give another "
                "--output, or the same options"
            )
    student.load_state_dict(checkpoint["student"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["random"])
    consumed = rows.restore(StreamState(**checkpoint["data"]))
    assert consumed == checkpoint["step"] * config.global_batch_size
    return int(checkpoint["step"])


def _run_identity(config: TrainConfig) -> dict[str, Any]:
    """Return the options that decide the weights."""
    free = ("output", "heldout", "exit_after", "evaluate_every", "checkpoint_every", "tensorboard")
    return {name: value for name, value in asdict(config).items() if name not in free}


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _autocast(config: TrainConfig) -> AbstractContextManager[None]:
    return torch.autocast(config.device, dtype=torch.bfloat16, enabled=config.bf16)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        train(parse_config(argv))
    except (ValueError, OSError) as error:
        print(f"train_hf: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
