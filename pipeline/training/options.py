"""The command line of `vocag train`: an option for every field of two dataclasses."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pipeline.training.config import TrainConfig
from pipeline.training.method import Method

_DESCRIPTION = """\
Train a Hugging Face student on an aligned dataset, by the paper's method or one that it is compared
with: on one GPU or a CPU, or data-parallel under torchrun with the same rows and losses. Run the
same command again to go on from the last checkpoint, bit for bit."""

_EXAMPLES = """\
examples:
  # the paper's setting, small: a teacher that runs beside the student
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --teacher Qwen/Qwen2.5-Math-1.5B \\
      --seq-length 2048 --global-batch-size 64 --micro-batch-size 2 --bf16 --output runs/teacher

  # the teacher's losses once, then any number of runs without it
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --seq-length 2048 \\
      --stored-losses Qwen/Qwen2.5-Math-7B --output runs/stored

  # what costs no teacher: plain continual pretraining, and chance
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --method full --output runs/full
  vocag train --data aligned --student TinyLlama/TinyLlama_v1.1 --method random --output runs/random

  # eight GPUs; bits per byte of two held-out sets and a Hugging Face folder every 500 steps
  torchrun --nproc-per-node 8 -m pipeline.training --data aligned --student models/student \\
      --teacher models/teacher --heldout math=heldout/math code=heldout/code \\
      --evaluate-every 500 --export-every 500 --tensorboard --output runs/eight

  # then compare
  vocag figures runs runs/full runs/random runs/teacher --output selectors.svg

methods, --method (docs/guidance.md has the equations):
  teacher         tokens on which the student is furthest behind the teacher: the paper
  full            every token: plain continual pretraining, no teacher
  random, student_loss, student_entropy
                  chance, or the student's own judgement: what a teacher must beat, no teacher
  teacher_loss    tokens that the teacher finds easiest
  rho1, rho1_self, kld
                  Rho-1 with a reference model, its self-reference, and distillation by
                  distributions: a teacher of the student's own vocabulary
  uld             distillation by sorted probabilities, any vocabulary
  chunks, chunks_random
                  equal chunks in place of alignment, by the teacher or by chance

output: log.jsonl (a line a step), checkpoint.pt, and at the end model/, a folder that
AutoModelForCausalLM and AutoTokenizer load."""

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "data and models": (
        *("data", "student", "output", "random_init", "teacher", "stored_losses", "heldout"),
        *("seq_length", "teacher_seq_length", "student_bos", "student_eos", "teacher_context"),
        *("num_epochs", "num_workers"),
    ),
    "method (docs/guidance.md)": tuple(f.name for f in fields(Method) if f.name != "seed"),
    "steps": (
        *("num_steps", "exit_after", "global_batch_size", "micro_batch_size", "learning_rate"),
        *("schedule", "warmup_steps", "min_lr_fraction", "weight_decay", "clip_norm", "seed"),
        *("device", "bf16"),
    ),
    "measuring and keeping": (
        *("evaluate_every", "checkpoint_every", "export_every", "tensorboard", "wandb"),
    ),
}
_METAVARS = {"data": "DATASET", "heldout": "DATASET", "student": "MODEL", "teacher": "MODEL",
             "stored_losses": "NAME", "student_bos": "TOKEN", "student_eos": "TOKEN",
             "teacher_context": "TOKEN", "output": "FOLDER", "device": "NAME",
             "wandb": "PROJECT"}  # fmt: skip


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """Return the run that a command line describes.

    Raises:
        ValueError: options that contradict each other.
        SystemExit: argparse's own errors, and --help.

    Example:
        >>> arguments = ["--data", "a", "--student", "s", "--output", "o", "--method", "full"]
        >>> parse_config(arguments).method.name
        'full'
    """
    values = vars(_parser().parse_args(argv))
    names = [entry.name for entry in fields(Method) if entry.name not in ("name", "seed")]
    chosen = {name: values.pop(name) for name in names}
    # One seed serves the order, the weights and the method.
    method = Method(name=values.pop("method"), seed=values["seed"], **chosen)
    values["heldout"] = tuple(values["heldout"])
    return TrainConfig(method=method, **values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vocag train",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        kind = Method if title.startswith("method") else TrainConfig
        known = {entry.name: entry for entry in fields(kind)}
        texts, hints = _texts(kind), get_type_hints(kind)
        for name in names:
            _add_option(group, known[name], hints[name], texts[name])
    return parser


def _texts(kind: type) -> dict[str, str]:
    """Return what a dataclass's docstring says of each field."""
    found = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", kind.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _add_option(group: argparse._ArgumentGroup, entry: "Field[Any]", hint: Any, text: str) -> None:
    option = "--" + {"name": "method"}.get(entry.name, entry.name).replace("_", "-")
    required = entry.default is MISSING
    default: dict[str, Any] = {"required": True} if required else {"default": entry.default}
    if not required and entry.default not in (None, "", (), False):
        text = text.rstrip(".") + f" (default: {entry.default})"
    help_text = text.replace("%", "%%")
    group.add_argument(option, help=help_text, **_arguments(entry.name, hint), **default)


def _arguments(name: str, hint: Any) -> dict[str, Any]:
    """Return what argparse needs for a field of this type."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"nargs": "+", "metavar": _METAVARS[name]}
    kinds = [part for part in get_args(hint) if part is not NoneType] or [hint]
    metavar = _METAVARS.get(name, "N" if kinds[0] is int else "X" if kinds[0] is float else None)
    return {"type": kinds[0], "metavar": metavar}
