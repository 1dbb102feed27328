"""A run's identity besides its weights, which checkpoints hold."""

from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_plugin.models.weight_sources import (
    TRACKER_FILE,
    checkpoint_args,
    newest_iteration,
    require_whole,
)
from pipeline.command_line.failures import hinted
from pipeline.streaming import AlignedRows, StreamState


class ChangedRunError(ValueError):
    """A checkpoint can't continue with this teacher or guidance."""


@dataclass(frozen=True)
class RunIdentity:
    """Data, the teacher's fingerprint and guidance.

    `stream` is a `StreamState` as a dict, without samples, which Megatron counts.
    """

    stream: dict[str, Any]
    teacher: str | None
    guidance: dict[str, Any]


def read_checkpoint(args: Namespace) -> Namespace | None:
    """Return the arguments in the checkpoint that Megatron will load; None for a new run.

    WeightsError if it isn't whole.
    """
    if not args.load or args.finetune or not Path(args.load, TRACKER_FILE).is_file():
        return None
    newest = newest_iteration(Path(args.load))
    require_whole(newest)
    return checkpoint_args(newest)


def saved_stream(checkpoint: Namespace | None) -> StreamState | None:
    """Return a checkpoint's position in the data."""
    saved = getattr(checkpoint, "vocag_run", None)
    return None if saved is None else StreamState(**saved["stream"])


def require_same_run(
    args: Namespace, checkpoint: Namespace | None, identity: RunIdentity, rows: AlignedRows
) -> None:
    """Check that the checkpoint loaded by Megatron continues in this run.

    ChangedRunError for another teacher, guidance or rotary embedding, StreamMismatchError for other
    data, order or batch size.
    """
    saved = getattr(checkpoint, "vocag_run", None)
    if checkpoint is None or saved is None:
        error = ChangedRunError(
            f"{args.load} was not saved by this trainer, so what it was trained on isn't known: "
            "add --finetune to start a new run from its weights"
        )
        raise hinted(error, "--finetune")
    stream = StreamState(**saved["stream"] | {"consumed_samples": args.consumed_train_samples})
    rows.restore(stream)
    now = asdict(identity)
    for name in ("teacher", "guidance"):
        if saved[name] != now[name]:
            error = ChangedRunError(
                f"{args.load} was made with {name} {saved[name]}, this run has {now[name]}: use "
                "the run's own, or add --finetune to start a new run from its weights"
            )
            raise hinted(error, "--finetune")
    # No weight's shape shows how positions rotate.
    was, runs = (getattr(each, "vocag_model_config", None) for each in (checkpoint, args))
    if was and runs and was["rope_parameters"] != runs["rope_parameters"]:
        raise ChangedRunError(
            f"{args.load} was trained with rope_parameters {was['rope_parameters']}, this run has "
            f"{runs['rope_parameters']}: name the --vocag-student that the run started from, or "
            "its --rotary-base"
        )
