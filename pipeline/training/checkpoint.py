"""A run's checkpoint: one file, replaced whole."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from pipeline.command_line.failures import first_line, hinted
from pipeline.command_line.pasted import pasted
from pipeline.models.devices import lacks_memory
from pipeline.models.teacher_files import find_teacher
from pipeline.streaming import AlignedRows, StreamState
from pipeline.training.config import TrainConfig
from pipeline.training.disk import replacing

CHECKPOINT = "checkpoint.pt"
# Options that may change when a run continues, since they don't decide the weights.
_FREE = (
    *("output", "heldout", "exit_after", "evaluate_every", "checkpoint_every", "export_every"),
    *("tracker", "workers", "device", "compile", "gradient_checkpointing", "dry_run"),
    "allow_untrained_teacher",
    "data",  # `StreamState` has its content
)
# Absent in runs that began before they existed.
_OLDER = {"draws": 0, "distill_map": "of an earlier release", "one_document_a_row": False}


def save_checkpoint(
    config: TrainConfig,
    rows: AlignedRows,
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    values: Mapping[str, float],
    teacher: str,
) -> None:
    """Write a run's state after `step` steps; DiskFullError if it doesn't fit.

    `values` are the step's, which the log doesn't have yet. `teacher` is by `teacher_digest`, of
    the run's start.

    Random numbers need no state: `loop.train_step` seeds them.
    """
    checkpoint = {
        "step": step,
        "values": dict(values),
        "run": _identity(config),
        "teacher": teacher,
        "data": asdict(rows.state(step * config.global_batch_size)),
        "student": student.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    # Through a Python file: torch's own reports a full disk as "unexpected pos".
    num_bytes = checkpoint_bytes(student, optimizer)
    with replacing(config.output / CHECKPOINT, num_bytes) as path, path.open("wb") as file:
        torch.save(checkpoint, file)


def teacher_digest(config: TrainConfig) -> str:
    """Return the SHA-256 of a running teacher's files; "" without one."""
    is_running = config.served.by == "running"
    return find_teacher(str(config.teaching.teacher)).sha256 if is_running else ""


def checkpoint_bytes(student: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights and optimizer state."""
    kept = [each for state in optimizer.state.values() for each in state.values()]
    tensors = [*student.state_dict().values(), *filter(torch.is_tensor, kept)]
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())


def saved_stream(config: TrainConfig) -> StreamState | None:
    """Return the checkpoint's position in the data, without its weights; None for a new run."""
    path = config.output / CHECKPOINT
    if not path.exists():
        return None
    return StreamState(**_read(config, mmap=True)["data"])


def load_checkpoint(
    config: TrainConfig,
    rows: AlignedRows,
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    teacher: str,
) -> tuple[int, dict[str, float]]:
    """Load the run's checkpoint, if any; return its step, and that step's values.

    ValueError if its options or data would give different weights.
    """
    path = config.output / CHECKPOINT
    if not path.exists():
        return 0, {}
    checkpoint = _read(config)
    taught_by = checkpoint.get("teacher", "")
    if taught_by and teacher and taught_by != teacher:
        error = ValueError(
            f"{path} was made with another teacher of that name: the files of "
            f"{config.teaching.teacher} have changed since; restore them, or give another output="
        )
        raise hinted(error, f"output={pasted(f'{config.output}-2')}")
    try:
        student.load_state_dict(checkpoint["student"])
    except RuntimeError as failure:
        error = ValueError(
            f"{path} is of a student with other weights than {config.student}, which has changed "
            "since: restore it, or give another output="
        )
        raise hinted(error, f"output={pasted(f'{config.output}-2')}") from failure
    optimizer.load_state_dict(checkpoint["optimizer"])
    consumed = rows.restore(StreamState(**checkpoint["data"]))
    assert consumed == checkpoint["step"] * config.global_batch_size
    return int(checkpoint["step"]), checkpoint.get("values", {})


def _read(config: TrainConfig, *, mmap: bool = False) -> dict[str, Any]:
    """Return the checkpoint; ValueError if it is damaged, or of other options."""
    path = config.output / CHECKPOINT
    try:
        read: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if "run" not in read:
            raise ValueError("no run in it")
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of as many types as torch's readers have
        told = first_line(error)
        if lacks_memory(error):
            raise ValueError(
                f"memory ran out while {path} was read ({told}): end other programs, raise ulimit "
                "-v, or continue on a machine with more"
            ) from error
        refusal = ValueError(
            f"{path} can't be read ({told}): it is cut or damaged, or another program's; move it "
            "away to begin anew, or give another output="
        )
        raise hinted(refusal, f"output={pasted(f'{config.output}-2')}") from error
    _require_same_options(config, read)
    return read


def _require_same_options(config: TrainConfig, checkpoint: Mapping[str, Any]) -> None:
    path = config.output / CHECKPOINT
    then, now = _OLDER | checkpoint["run"], _identity(config)
    if checkpoint["data"].get("teachers") and config.teaching.names:
        # Names change their meaning when others score the data; `StreamState` has the rule.
        then["stored_losses"] = now["stored_losses"]
    if then.get("method.name") != now["method.name"]:
        differences = [f"with method={then.get('method.name')}, this run has {now['method.name']}"]
    else:
        differences = [
            f"with {name.removeprefix('method.')}={_told(then.get(name))}, this run has "
            f"{_told(value)}"
            for name, value in now.items()
            if value != then.get(name)
        ]
    if differences:
        told = "; ".join(dict.fromkeys(differences))  # a seed is the run's and its method's
        error = ValueError(f"{path} was made {told}: give another output=, or the same options")
        raise hinted(error, f"output={pasted(f'{config.output}-2')}")


def _told(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _identity(config: TrainConfig) -> dict[str, Any]:
    values = {name: value for name, value in asdict(config).items() if name not in _FREE}
    method, teaching = values.pop("method"), values.pop("teaching")
    method["top_k"] = teaching.pop("top_k")  # its place in runs of earlier releases
    teaching["draws"] = config.served.entries.drawn
    if config.served.with_distributions:
        teaching["distill_map"] = method["distill_map"]
    del method["distill_map"]
    return {**values, **teaching, **{f"method.{name}": value for name, value in method.items()}}
