"""The options of `train_hf.py`: every field of two dataclasses is an option of the command line."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from train_methods import NEED_LOSSES, NEED_TEACHER, Method


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run; the command line has an option for every field.

    Attributes:
        data: aligned dataset to train on.
        student: folder, Hugging Face repository or .gguf file.
        output: folder of this run: log.jsonl, checkpoint.pt and, at the end, model/.
        heldout: aligned dataset to measure bits per byte on; None measures nothing.
        teacher: folder, repository or .gguf file; for rho1 the reference model.
        teacher_losses: what beam_jobs.score has stored, in place of a teacher: a score manifest or
            a teacher's name.
        random_init: use only the student's configuration.
        method: how the loss is made.
        num_steps: of the whole run; the learning rate ends there.
        exit_after: stop after this step, with a checkpoint, to go on later.
        seq_length: student tokens per row.
        global_batch_size: rows per step.
        micro_batch_size: rows at a time; the rest is accumulated.
        student_bos: token before a student's text, its id, or none; by default the dataset's.
        student_eos: token after a student's document, likewise.
        teacher_context: token before a teacher's text, likewise.
        num_epochs: how often the data may be read.
        learning_rate: its maximum.
        warmup_steps: linear, from 0.
        min_lr_fraction: of the maximum, where the cosine ends.
        weight_decay: of matrices.
        clip_norm: of the gradient.
        seed: of the order, the initial weights and random choices.
        evaluate_every: steps; 0: at the end only.
        checkpoint_every: steps; 0: at the end only.
        device: cpu or cuda.
        bf16: compute in bfloat16; weights stay fp32.
        tensorboard: also write TensorBoard's events.
    """

    data: str
    student: str
    output: Path
    heldout: str | None = None
    teacher: str | None = None
    teacher_losses: str | None = None
    random_init: bool = False
    method: Method = field(default_factory=Method)
    num_steps: int = 1000
    exit_after: int | None = None
    seq_length: int = 512
    global_batch_size: int = 8
    micro_batch_size: int = 4
    student_bos: str | None = None
    student_eos: str | None = None
    teacher_context: str | None = None
    num_epochs: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    min_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    bf16: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without the data."""
        if self.teacher_losses is not None and self.method.name not in NEED_LOSSES:
            raise ValueError(
                f"--teacher-losses serves --method {' and '.join(NEED_LOSSES)}; {self.method.name} "
                "needs a --teacher, or none"
            )
        if self.teacher_losses is not None and self.teacher is not None:
            raise ValueError("--teacher and --teacher-losses are given: choose one")
        if self.method.name in NEED_TEACHER and not (self.teacher or self.teacher_losses):
            raise ValueError(f"--method {self.method.name} needs --teacher")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is no multiple of "
                f"--micro-batch-size {self.micro_batch_size}"
            )
        if not 0 <= self.warmup_steps < self.num_steps:
            raise ValueError(
                f"--warmup-steps {self.warmup_steps} must be below --num-steps {self.num_steps}"
            )


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """Return the run that a command line describes.

    Raises:
        ValueError: options that contradict each other.

    Example:
        >>> parse_config(["--data", "a", "--student", "s", "--output", "o", "--method", "full"])
    """
    parser = argparse.ArgumentParser(description="Train a student on aligned rows, by any method.")
    _add_options(parser, TrainConfig, skip=("method",))
    # One seed serves the order, the weights and the method.
    _add_options(parser, Method, skip=("seed",), rename={"name": "method"})
    values = vars(parser.parse_args(argv))
    names = [entry.name for entry in fields(Method) if entry.name not in ("name", "seed")]
    chosen = {name: values.pop(name) for name in names}
    method = Method(name=values.pop("method"), seed=values["seed"], **chosen)
    return TrainConfig(method=method, **values)


def _add_options(
    parser: argparse.ArgumentParser,
    kind: type,
    *,
    skip: Sequence[str],
    rename: dict[str, str] | None = None,
) -> None:
    """Add an option for every field, with its line of the class's docstring as help."""
    texts = dict(re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", kind.__doc__ or "", re.MULTILINE))
    for entry in fields(kind):
        if entry.name in skip:
            continue
        option = "--" + (rename or {}).get(entry.name, entry.name).replace("_", "-")
        text = " ".join(texts[entry.name].split()).replace("%", "%%")
        required = entry.default is MISSING
        text += "" if required or entry.default is None else f" (default: {entry.default})"
        arguments = _arguments(get_type_hints(kind)[entry.name])
        default = {"required": True} if required else {"default": entry.default}
        parser.add_argument(option, help=text, **arguments, **default)


def _arguments(hint: Any) -> dict[str, Any]:
    """Return what argparse needs for a field of this type."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    kinds = [part for part in get_args(hint) if part is not NoneType] or [hint]
    return {"type": kinds[0]}
