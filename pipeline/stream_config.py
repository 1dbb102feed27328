"""What a run reads of a dataset, and how: options of `pipeline.streaming`, without torch."""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.damage import OnDamage
from pipeline.packing import Convention, PackingRules, suggest_teacher_seq_length
from schemas.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """What a run reads, and how.

    Attributes:
        path: the dataset's folder or manifest; a path, or a URL that `fsspec` reads.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row; None takes `suggest_teacher_seq_length`.
        seed: of the order.
        global_batch_size: samples per step; what does not fill a step at an epoch's end is left
            out of that epoch. Every epoch leaves out other rows.
        num_epochs: epochs that the Dataset's length covers.
        shuffle_shards: shards that are shuffled together, and so are read at one time.
        student: the tokens added around the student's text; None takes the tokenizer's.
        teacher: the same for the teacher.
        on_damage: "raise", or "quarantine" to mask what can't be read, counted and listed.
        quarantine_file: where that list is kept; None puts it beside the plan.
        check_hashes: compare every shard's SHA-256 at start, not only its size.
        cache_folder: for remote shards and for plans that can't lie beside the dataset.
        cache_bytes: limit of the remote shards kept there.
        window_rows: rows packed together, see `PackingRules`.
        teacher_losses: losses that `beam_jobs.score` has stored: a score manifest, or the name of
            a teacher; None leaves them out of the rows.
    """

    path: str
    seq_length: int
    teacher_seq_length: int | None = None
    seed: int = 0
    global_batch_size: int = 1
    num_epochs: int = 1
    shuffle_shards: int = 8
    student: Convention | None = None
    teacher: Convention | None = None
    on_damage: OnDamage = "raise"
    quarantine_file: Path | None = None
    check_hashes: bool = False
    cache_folder: Path = field(default_factory=lambda: Path.home() / ".cache" / "vocag")
    cache_bytes: int = 256 << 30
    window_rows: int = 1024
    teacher_losses: str | None = None

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("global_batch_size", "num_epochs", "shuffle_shards", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")

    def rules(self, manifest: Manifest) -> PackingRules:
        """Return the packing rules, defaults filled in from the manifest."""
        return PackingRules(
            seq_length=self.seq_length,
            teacher_seq_length=self.teacher_seq_length
            or suggest_teacher_seq_length(manifest, self.seq_length),
            student=self.student or Convention.of_tokenizer(manifest.student, ends=True),
            teacher=self.teacher or Convention.of_tokenizer(manifest.teacher, ends=False),
            window_rows=self.window_rows,
        )
