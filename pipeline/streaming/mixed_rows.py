"""Rows of a mixture of datasets, by the same numbers as rows of one dataset.

`pipeline.packing.mixture_plan` says which dataset gives row r of a run and which of that dataset's
rows it is; `AlignedRows` reads it. Nothing else is remembered: a run resumes from a number.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils.data import Dataset as TorchDataset

from pipeline.dataset.files import Dataset
from pipeline.packing.mixed_datasets import (
    mixture_fingerprint,
    mixture_rules,
    open_datasets,
    require_no_overlap,
)
from pipeline.packing.mixture_file import Mixture, is_mixture, read_mixture
from pipeline.packing.mixture_plan import Source, plan_mixture
from pipeline.packing.rules import PackingRules
from pipeline.streaming.batch import Rows
from pipeline.streaming.config import StreamConfig
from pipeline.streaming.damage import DamageLog
from pipeline.streaming.generations import LATEST, Generation
from pipeline.streaming.layout import RowLayout
from pipeline.streaming.rows import AlignedRows, whole_batches
from pipeline.streaming.state import StreamState
from schemas.errors import DatasetError, ForeignLossesError
from schemas.manifest import Manifest
from schemas.sidecar import TeacherRule

logger = logging.getLogger(__name__)

_NO_END, _MANY_EPOCHS = 1 << 62, 1 << 30
"""More rows and epochs than any run reads, and few enough for `len`."""


class MixedRows(TorchDataset[Rows]):
    """The rows of a run over several datasets, by number.

    Attributes:
        config: what it was opened with.
        mixture: what its file says.
        datasets: each one's rows, in the file's order; their run positions count through their
            own epochs.
        plan: which of them gives which row.
        layout: the fields of a row; `source` among them.
    """

    def __init__(self, config: StreamConfig, saved: StreamState | None = None) -> None:
        """Open all datasets of a mixture, load or make their plans, and check that they fit.

        Args:
            config: its path is the mixture's file, which also says how often each dataset is read
                and by which seed: `num_epochs` and `seed` are not used.
            saved: the state of the run that goes on: datasets that have grown since are opened as
                they were.

        Raises:
            DatasetError: no finished dataset, one that stands there twice or whose parts share
                documents, or damage that is not to be quarantined.
            ForeignLossesError: stored losses that are incomplete, don't belong to these rows, or
                are of several teachers.
            ForeignTokenizerError: datasets of several pairs of tokenizers.
            MixtureFileError: a file that can't be read, or contradicts itself.
            WhereError: a condition can't be understood, or is true of no document.
            ValueError: impossible configuration.

        Example:
            >>> rows = MixedRows(StreamConfig(path="mixture.toml", seq_length=64))  # doctest: +SKIP
        """
        self.config = config
        self.mixture = read_mixture(config.path)
        datasets = _open_generations(self.mixture, config.generation, saved)
        rules = mixture_rules(
            self.mixture,
            datasets,
            seq_length=config.seq_length,
            teacher_seq_length=config.teacher_seq_length,
            student=config.student,
            teacher=config.teacher,
            student_bos=config.student_bos,
            student_eos=config.student_eos,
            teacher_context=config.teacher_context,
            window_rows=config.window_rows,
        )
        self.datasets = _open_all(config, self.mixture, datasets, rules)
        documents = [rows.plan.segments["document"] for rows in self.datasets]
        require_no_overlap(self.mixture, datasets, documents)
        self.plan = plan_mixture(
            [
                Source(entry.name, len(rows.plan), rows.num_student_tokens, entry.max_epochs)
                for entry, rows in zip(self.mixture.datasets, self.datasets, strict=True)
            ],
            self.mixture.stages,
        )
        self.layout = RowLayout(
            rules.seq_length,
            rules.teacher_seq_length,
            max(rows.layout.max_segments for rows in self.datasets),
            with_losses=config.stored_losses is not None,
            sources=tuple(entry.name for entry in self.mixture.datasets),
        )
        for rows in self.datasets:
            rows.use_layout(self.layout)
        self._fingerprint = mixture_fingerprint(self.mixture, datasets)
        self._num_rows = _NO_END if self.plan.num_rows is None else self.plan.num_rows
        self._num_rows = whole_batches(self._num_rows, config.global_batch_size)
        _require_one_teacher(self.mixture, self.datasets)

    def __len__(self) -> int:
        """Return the rows of the run, whole global batches; 2**62 or so where it has no end."""
        return self._num_rows

    def __getitem__(self, run_position: int) -> Rows:
        """Return one row.

        Raises:
            IndexError: past the mixture's end.
            DatasetError: the row's sample or shard is damaged and that is not to be quarantined.
        """
        return Rows(self.__getitems__([run_position]).buffer[0], self.layout)

    def __getitems__(self, run_positions: Sequence[int]) -> Rows:
        """Return a batch, one tensor; a DataLoader calls this, and then `collate_rows`."""
        buffer = torch.empty((len(run_positions), self.layout.num_words), dtype=torch.int32)
        self.read_into(buffer, run_positions)
        return Rows(buffer, self.layout)

    def read_into(self, buffer: torch.Tensor, run_positions: Sequence[int]) -> None:
        """Write a batch into memory that exists: int32 [len(run_positions), layout.num_words]."""
        place = self.layout.starts["source"]
        for row, run_position in zip(buffer.numpy(), run_positions, strict=True):
            source, position = self._locate(run_position)
            self.datasets[source].write_row(row, position)
            row[place] = source

    @property
    def dataset(self) -> Dataset:
        """The first dataset's files; its tokenizers are those of all."""
        return self.datasets[0].dataset

    @property
    def manifest(self) -> Manifest:
        """The first dataset's; its tokenizers are those of all, its totals are its own."""
        return self.datasets[0].manifest

    @property
    def rules(self) -> PackingRules:
        """What a row is, of any of the datasets."""
        return self.datasets[0].rules

    @property
    def teacher_rule(self) -> TeacherRule | None:
        """What determined the stored losses that rows hold; None where they hold none."""
        return self.datasets[0].teacher_rule

    @property
    def damage(self) -> dict[str, DamageLog]:
        """What was left out in this process by dataset, and the files that list it."""
        named = zip(self.layout.sources, self.datasets, strict=True)
        return {name: rows.damage for name, rows in named}

    def source_of(self, run_position: int) -> str:
        """Return the name of the dataset that a row is from.

        Example:
            >>> rows.source_of(0)
            'web'
        """
        return self.layout.sources[self._locate(run_position)[0]]

    def state(self, consumed_samples: int) -> StreamState:
        """Return what a checkpoint keeps of the data."""
        return StreamState(
            fingerprint=self._fingerprint,
            seq_length=self.rules.seq_length,
            teacher_seq_length=self.rules.teacher_seq_length,
            rules=self.rules.fingerprint,
            seed=self.mixture.seed,
            shuffle_shards=self.config.shuffle_shards,
            samples_per_epoch=0,
            consumed_samples=consumed_samples,
            generations=tuple(rows.manifest.generation for rows in self.datasets),
        )

    def restore(self, saved: StreamState) -> int:
        """Return the samples that a checkpoint's run has consumed.

        Raises:
            StreamMismatchError: other datasets, stages, weights, order or lengths.

        Example:
            >>> rows.restore(rows.state(96))
            96
        """
        self.state(0).require_same_run(
            saved,
            global_batch_size=self.config.global_batch_size,
            moves_on=self.config.generation == LATEST and _is_of(self.mixture, saved),
        )
        return saved.consumed_samples

    def leave_out(self, run_position: int, segment: int, what: str) -> None:
        """Raise for a segment that can't be learned from, or list it: `AlignedRows.leave_out`.

        Raises:
            NonFiniteLossError: damage is not to be quarantined; names document, shard and step.
        """
        source, position = self._locate(run_position)
        step = run_position // self.config.global_batch_size + 1
        self.datasets[source].leave_out(position, segment, what, step=step)

    def _locate(self, run_position: int) -> tuple[int, int]:
        if not 0 <= run_position < self._num_rows:
            raise IndexError(
                f"row {run_position} is not in 0 … {self._num_rows - 1}: raise max_epochs in "
                f"{self.mixture.path}, or let a dataset repeat"
            )
        return self.plan.locate(run_position)


RunRows = AlignedRows | MixedRows
"""The rows of a run: what trainers take."""


def open_rows(config: StreamConfig, saved: StreamState | None = None) -> RunRows:
    """Return the rows of a dataset, or of a mixture where the path ends in ".toml".

    Args:
        config: what is read, and how.
        saved: the state of the run that goes on, None of a new run: where the data have grown
            since, they are opened as they were. `restore` then says where the run stands.

    Raises:
        ValueError: see `AlignedRows` and `MixedRows`.

    Example:
        >>> rows = open_rows(StreamConfig(path="mixture.toml", seq_length=64))  # doctest: +SKIP
        >>> rows.layout.sources  # doctest: +SKIP
        ('web', 'math')
    """
    return MixedRows(config, saved) if is_mixture(config.path) else AlignedRows(config, saved)


def _open_generations(
    mixture: Mixture, generation: Generation, saved: StreamState | None
) -> tuple[Dataset, ...]:
    newest = open_datasets(mixture)
    if generation == LATEST or saved is None or len(saved.generations) != len(newest):
        return newest
    now = [dataset.manifest.generation for dataset in newest]
    if now == list(saved.generations) or not _is_of(mixture, saved):
        return newest
    logger.warning(
        "the datasets of %s are at generations %s now; the run goes on with %s, on which it was "
        "started (generation latest moves it on)",
        mixture.path,
        now,
        list(saved.generations),
    )
    return open_datasets(mixture, saved.generations)


def _is_of(mixture: Mixture, saved: StreamState) -> bool:
    """Whether a state is of a mixture, with its datasets as they were then."""
    if len(saved.generations) != len(mixture.datasets):
        return False
    try:
        datasets = open_datasets(mixture, saved.generations)
    except DatasetError:  # a dataset that never had such a generation
        return False
    return mixture_fingerprint(mixture, datasets) == saved.fingerprint


def _open_all(
    config: StreamConfig, mixture: Mixture, datasets: Sequence[Dataset], rules: PackingRules
) -> tuple[AlignedRows, ...]:
    common = replace(
        config,
        teacher_seq_length=rules.teacher_seq_length,
        student=rules.student,
        teacher=rules.teacher,
        student_bos=None,
        student_eos=None,
        teacher_context=None,
        seed=mixture.seed,
        # A dataset gives rows one at a time, and all of them in each epoch.
        global_batch_size=1,
    )
    return tuple(
        AlignedRows(
            replace(
                common,
                path=entry.path,
                where=entry.where,
                num_epochs=entry.max_epochs or _MANY_EPOCHS,
                generation=dataset.manifest.generation,
            )
        )
        for entry, dataset in zip(mixture.datasets, datasets, strict=True)
    )


def _require_one_teacher(mixture: Mixture, datasets: Sequence[AlignedRows]) -> None:
    first, *others = (rows.teacher_rule for rows in datasets)
    for entry, rule in zip(mixture.datasets[1:], others, strict=True):
        if first is None or rule is None:
            continue
        # Which documents it has scored is another thing in each dataset.
        if replace(rule, where="") != replace(first, where=""):
            raise ForeignLossesError(
                f'{mixture.path}: the stored losses of "{entry.name}" and of '
                f'"{mixture.datasets[0].name}" are of two teachers or conventions '
                f"({rule.fingerprint[:16]}… and {first.fingerprint[:16]}…): name one teacher that "
                "has scored all datasets"
            )
