"""The data's part of a checkpoint."""

from dataclasses import dataclass


class StreamMismatchError(ValueError):
    """A run can't continue with this data: its remaining samples would differ."""


@dataclass(frozen=True)
class StreamState:
    """The data's part of a checkpoint; `dataclasses.asdict` makes it JSON.

    Other fields are the `StreamConfig`'s.

    Attributes:
        fingerprint: the dataset's or the mixture's.
        rules: fingerprint of lengths, conventions and packing.
        samples_per_epoch: rows of a dataset's whole global batches, or of a mixture's datasets once
            each.
        consumed_samples: samples used, over all epochs.
        where: condition on documents, "" for all.
        scores: digest of the losses that conditions use, "" without any.
        cells: digest of the vocabularies' cells, "" if the method needs none.
        generations: of each dataset, to open them again; the fingerprint is compared instead.
        global_batch_size: rows of a step; 0 in checkpoints from before it was kept.
        teachers: fingerprint of the rule by which the rows' losses were stored; "" without any, and
            in checkpoints from before it was kept.
    """

    fingerprint: str
    seq_length: int
    teacher_seq_length: int
    rules: str
    seed: int
    shuffle_shards: int
    samples_per_epoch: int
    consumed_samples: int
    where: str = ""
    scores: str = ""
    cells: str = ""
    generations: tuple[int, ...] = ()
    global_batch_size: int = 0
    teachers: str = ""

    def require_same_run(self, saved: "StreamState", *, moves_on: bool = False) -> None:
        """Check that a saved state continues in this one; `moves_on` accepts another generation.

        Raises:
            StreamMismatchError: with the difference, both values and the remedy.
        """
        for name, remedy in _REMEDIES.items():
            if moves_on and name in _OF_A_GENERATION:
                continue
            now, then = getattr(self, name), getattr(saved, name)
            if now != then and not (name in _ADDED and not then):
                raise StreamMismatchError(
                    f"the checkpoint was made with {name} {_told(then)}, this run has "
                    f"{_told(now)}: {remedy}"
                )
        if saved.consumed_samples % self.global_batch_size:
            raise StreamMismatchError(
                f"the checkpoint has consumed {saved.consumed_samples} samples, which isn't "
                f"a multiple of global_batch_size {self.global_batch_size}: use the batch size "
                "that the run was started with"
            )


def _told(value: str | int) -> str:
    return "nothing" if value == "" else str(value)


_REMEDIES = {
    "fingerprint": "name the dataset that the run was started with, or, of a mixture, restore its "
    "datasets, their order, conditions and max_epochs, its stages, weights and seed; or start a "
    "new run",
    "seq_length": "use the run's seq_length, or start a new run",
    "teacher_seq_length": "use the run's teacher_seq_length, or start a new run",
    "rules": "use the run's conventions and window_rows, or start a new run",
    "seed": "use the run's seed",
    "shuffle_shards": "use the run's shuffle_shards",
    "where": "use the run's own condition, or start a new run",
    "scores": "documents were chosen by different losses: restore the teacher's sidecars and score "
    "manifest that the run was started with, or start a new run",
    "cells": "the tokens that stand for each other were counted on other data, or by another "
    "release: use what the run was started with, or start a new run",
    "teachers": "the losses that it learned from were of another teacher, order or way of "
    "scoring: name those by their first digits, restore them, or start a new run",
    "global_batch_size": "use the run's global_batch_size",
    "samples_per_epoch": "use the global_batch_size that the run was started with",
}
_ADDED = ("global_batch_size", "teachers")
"""Unknown in checkpoints from before they were kept."""
_OF_A_GENERATION = ("fingerprint", "samples_per_epoch", "scores", "cells")
