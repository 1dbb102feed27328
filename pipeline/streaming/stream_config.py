"""Options of `pipeline.streaming`, without torch."""

import os
from dataclasses import KW_ONLY, dataclass, field
from operator import index
from os import PathLike, fspath
from pathlib import Path
from typing import get_args

from pipeline.command_line.option_parsing import require_known, require_least
from pipeline.packing.reading import Reading
from pipeline.scoring.teaching import NOBODY, Teaching
from pipeline.streaming.damage import OnDamage

_NUMBERS = (
    *("seq_length", "teacher_seq_length", "seed", "global_batch_size", "num_epochs"),
    *("shuffle_shards", "cache_bytes", "window_rows"),
)


@dataclass(frozen=True)
class StreamConfig:
    """What a run reads, and how.

    Attributes:
        data: a `Reading`, or the path of a dataset or a mixture.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row; None takes `suggest_teacher_seq_length`.
        seed: of the order.
        global_batch_size: samples per step; what fills no step is left out, other rows in each
            epoch.
        num_epochs: epochs that the Dataset's length covers, None for no end. A mixture's file has
            its own seed and epochs.
        shuffle_shards: shards shuffled together, so read at one time.
        on_damage: "raise", or "quarantine" to mask, count and list what can't be read.
        cache_folder: for remote shards, and plans that can't lie next to the dataset.
        cache_bytes: limit of the remote shards kept there.
        window_rows: rows packed together, see `PackingRules`.
        one_document_a_row: no packing: a document, or a piece of a long one, in each row.
        teaching: whose stored losses rows hold; a running teacher is the trainer's.
        with_distributions: whether rows also hold the distributions stored with these losses, over
            the student's vocabulary.
        with_cells: whether the method needs the vocabularies' cells (`vocabulary_map`).
        text_labels: of chats, learn only tokens that cover a byte of a learned text, not what ends
            a turn or the template writes.
    """

    data: Reading | str | PathLike[str]
    _: KW_ONLY
    seq_length: int = 512
    teacher_seq_length: int | None = None
    seed: int = 0
    global_batch_size: int = 1
    num_epochs: int | None = 1
    shuffle_shards: int = 8
    on_damage: OnDamage = "raise"
    cache_folder: Path = field(default_factory=lambda: _home() / ".cache" / "vocag")
    cache_bytes: int = 256 << 30
    window_rows: int = 1024
    one_document_a_row: bool = False
    teaching: Teaching = NOBODY
    with_distributions: bool = False
    with_cells: bool = False
    text_labels: bool = False

    @property
    def reading(self) -> Reading:
        """The data as a `Reading`."""
        return self.data if isinstance(self.data, Reading) else Reading(fspath(self.data))

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, value))
        require_least(self, "global_batch_size", "num_epochs", "shuffle_shards", "cache_bytes")
        require_known("on_damage=", [self.on_damage], get_args(OnDamage))
        if not isinstance(self.teaching, Teaching):
            raise ValueError(
                f"teaching {self.teaching!r} isn't a Teaching: give Teaching(stored_losses=…) or "
                "Teaching(teacher=…)"
            )
        if self.with_distributions and self.teaching.stored_losses is None:
            raise ValueError(
                "with_distributions reads what is stored with losses: give teaching some "
                "stored_losses"
            )


def _whole(name: str, value: object) -> int:
    try:
        return index(value)  # type: ignore[arg-type]  # numpy's, too, which JSON doesn't know
    except TypeError:
        raise ValueError(f"{name} {value!r} isn't a whole number") from None


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise ValueError(
            f"user {os.getuid()} has no home folder, whose .cache would hold plans and shards: set "
            "HOME, or give cache_folder"
        ) from error
