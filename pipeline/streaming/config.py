"""What a run reads of a dataset, and how: options of `pipeline.streaming`, without torch."""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.dataset.conventions import choose_conventions
from pipeline.dataset.files import Dataset
from pipeline.packing.mixture_file import is_mixture
from pipeline.packing.rules import Convention, PackingRules
from pipeline.streaming.damage import OnDamage
from pipeline.streaming.generations import LATEST, Generation
from schemas.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """What a run reads, and how.

    Attributes:
        path: the dataset's folder or manifest, or a mixture's .toml file; a path, or a URL that
            `fsspec` reads.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row; None takes `suggest_teacher_seq_length`.
        seed: of the order.
        global_batch_size: samples per step; what does not fill a step at an epoch's end is left
            out of that epoch. Every epoch leaves out other rows.
        num_epochs: epochs that the Dataset's length covers.
        shuffle_shards: shards that are shuffled together, and so are read at one time.
        student: the tokens added around the student's text; None takes the dataset's, with the
            next two in their place.
        teacher: the same for the teacher.
        student_bos: stands before a student's text: a token's name or id, or "none"; None takes
            the dataset's.
        student_eos: stands after a document's last student token, likewise.
        teacher_context: stands before a teacher's text, likewise.
        on_damage: "raise", or "quarantine" to mask what can't be read, counted and listed.
        quarantine_file: where that list is kept; None puts it beside the plan.
        check_hashes: compare every shard's SHA-256 at start, not only its size.
        cache_folder: for remote shards and for plans that can't lie beside the dataset.
        cache_bytes: limit of the remote shards kept there.
        window_rows: rows packed together, see `PackingRules`.
        stored_losses: losses that `beam_jobs.score` has stored: a score manifest, or the name of
            a teacher; None leaves them out of the rows.
        where: read those documents only that this is true of, such as "language == 'en' and score >
            0.5", see `pipeline.dataset.selection`; "" reads all. Not of a mixture, whose file says
            it of each dataset.
        generation: which state of a dataset that grows is read: its number (not of a mixture), or
            "latest", to which a run that goes on then moves; None: the one on which the run was
            started, the newest of a new run.
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
    student_bos: str | None = None
    student_eos: str | None = None
    teacher_context: str | None = None
    on_damage: OnDamage = "raise"
    quarantine_file: Path | None = None
    check_hashes: bool = False
    cache_folder: Path = field(default_factory=lambda: Path.home() / ".cache" / "vocag")
    cache_bytes: int = 256 << 30
    window_rows: int = 1024
    stored_losses: str | None = None
    where: str = ""
    generation: Generation = None

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("global_batch_size", "num_epochs", "shuffle_shards", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        if self.where.strip() and is_mixture(self.path):
            raise ValueError(
                f"where {self.where.strip()} is of one dataset, and {self.path} a mixture of "
                'several: give its datasets a "where" there'
            )
        if isinstance(self.generation, int) and is_mixture(self.path):
            raise ValueError(
                f"generation {self.generation} is of one dataset, and {self.path} a mixture of "
                f'several: leave it out, or write "{LATEST}"'
            )
        for convention, names in (
            ("student", ("student_bos", "student_eos")),
            ("teacher", ("teacher_context",)),
        ):
            given = [name for name in names if getattr(self, name) is not None]
            if getattr(self, convention) is not None and given:
                raise ValueError(
                    f"the {convention}'s convention is given whole and by {given[0]} "
                    f"{getattr(self, given[0])!r}: choose one"
                )

    def choose_conventions(self, dataset: Dataset) -> Manifest:
        """Return a dataset's manifest with the tokens around a text that this run names.

        Raises:
            ValueError: no such token.
        """
        return choose_conventions(
            dataset,
            student_bos=self.student_bos,
            student_eos=self.student_eos,
            teacher_context=self.teacher_context,
        )

    def rules(self, manifest: Manifest) -> PackingRules:
        """Return the packing rules, defaults filled in from what `choose_conventions` gives."""
        return PackingRules.of_dataset(
            manifest,
            seq_length=self.seq_length,
            teacher_seq_length=self.teacher_seq_length,
            student=self.student,
            teacher=self.teacher,
            window_rows=self.window_rows,
        )
