"""What a run is made of besides its weights; a checkpoint goes on with nothing else."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_plugin.weight_sources import checkpoint_args, newest_iteration
from pipeline.streaming import AlignedRows, StreamState


class ChangedRunError(ValueError):
    """A checkpoint can't go on with this teacher or guidance."""


@dataclass(frozen=True)
class RunIdentity:
    """What every checkpoint notes.

    Attributes:
        stream: the data's `StreamState`, as a dict; Megatron counts the samples.
        teacher: fingerprint of its weights, None without a teacher.
        guidance: options of the loss.
    """

    stream: dict[str, Any]
    teacher: str | None
    guidance: dict[str, Any]


def require_same_run(args: Namespace, identity: RunIdentity, rows: AlignedRows) -> None:
    """Check that the checkpoint which Megatron has loaded goes on in this run.

    Raises:
        ChangedRunError: another teacher or guidance.
        StreamMismatchError: other data, order or batch size.
    """
    saved = getattr(checkpoint_args(newest_iteration(Path(args.load))), "vocag_run", None)
    if saved is None:
        raise ChangedRunError(
            f"{args.load} was not saved by this trainer, so what it was trained on isn't known: "
            "add --finetune to start a new run from its weights"
        )
    stream = StreamState(**saved["stream"] | {"consumed_samples": args.consumed_train_samples})
    rows.restore(stream)
    now = asdict(identity)
    for name in ("teacher", "guidance"):
        if saved[name] != now[name]:
            raise ChangedRunError(
                f"{args.load} was made with {name} {saved[name]}, this run has {now[name]}: use "
                "the run's own, or add --finetune to start a new run from its weights"
            )
