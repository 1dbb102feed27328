"""Options of `pipeline.streaming`, without torch."""

from dataclasses import KW_ONLY, dataclass, field
from os import PathLike, fspath
from pathlib import Path

from pipeline.packing.reading import Reading
from pipeline.scoring.teaching import NOBODY, Teaching
from pipeline.streaming.damage import OnDamage


@dataclass(frozen=True)
class StreamConfig:
    """What a run reads, and how.

    Attributes:
        data: what to read: a `Reading`, or the path of a dataset or a mixture.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row; None takes `suggest_teacher_seq_length`.
        seed: of the order.
        global_batch_size: samples per step; what does not fill a step at an epoch's end is left
            out of that epoch. Every epoch leaves out other rows.
        num_epochs: epochs that the Dataset's length covers; None: without end. A mixture's file
            says how often each of its datasets is read, and by which seed.
        shuffle_shards: shards that are shuffled together, and so are read at one time.
        on_damage: "raise", or "quarantine" to mask what can't be read, counted and listed.
        cache_folder: for remote shards and for plans that can't lie next to the dataset.
        cache_bytes: limit of the remote shards kept there.
        window_rows: rows packed together, see `PackingRules`.
        one_document_a_row: no packing: a document, or a piece of a long one, in each row.
        teaching: whose stored losses rows hold; a teacher that runs is the trainer's.
        with_distributions: whether rows hold the distributions stored with these losses, too, over
            the student's vocabulary.
        with_cells: whether the run's method needs the cells of both vocabularies
            (`vocabulary_map`), which a checkpoint then names.
        text_labels: of chats, whether labels are only those that cover a byte of a learned text:
            what ends a turn, or the template writes, is then context.
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
    cache_folder: Path = field(default_factory=lambda: Path.home() / ".cache" / "vocag")
    cache_bytes: int = 256 << 30
    window_rows: int = 1024
    one_document_a_row: bool = False
    teaching: Teaching = NOBODY
    with_distributions: bool = False
    with_cells: bool = False
    text_labels: bool = False

    @property
    def reading(self) -> Reading:
        """The data to read, also if only a path was given."""
        return self.data if isinstance(self.data, Reading) else Reading(fspath(self.data))

    def __post_init__(self) -> None:
        """Check the counts, and that required distributions exist."""
        for name in ("global_batch_size", "num_epochs", "shuffle_shards", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is below 1")
        if self.with_distributions and self.teaching.stored_losses is None:
            raise ValueError(
                "with_distributions reads what is stored with losses: give teaching some "
                "stored_losses"
            )
