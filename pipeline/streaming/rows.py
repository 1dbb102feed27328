"""Training rows for two models at once, as a map-style torch Dataset.

Each row is found by arithmetic, so a run resumes exactly from its number of consumed samples, with
any number of replicas and workers. docs/concepts/rows.md shows a row, place by place.
"""

import os
from collections.abc import Sequence
from operator import index, methodcaller
from threading import Lock

import torch
from torch.utils.data import Dataset as TorchDataset

from pipeline.dataset.files import Dataset
from pipeline.packing.mixture_file import Mixture
from pipeline.packing.mixture_plan import MixturePlan, Source, plan_mixture
from pipeline.packing.opening import OpenedRun, open_run
from pipeline.packing.rules import PackingRules
from pipeline.packing.state import StreamState
from pipeline.scoring.stored_teachers import TeachersRule
from pipeline.streaming.batch import Rows
from pipeline.streaming.dataset_rows import DatasetRows, whole_batches
from pipeline.streaming.layout import RowLayout
from pipeline.streaming.stream_config import StreamConfig
from pipeline.streaming.vocabularies import vocabulary_map
from schemas.distribution_rule import NO_ENTRIES
from schemas.errors import ForeignLossesError
from schemas.manifest import Manifest

_NO_END = 1 << 62
"""More rows than any run reads, and few enough for `len`."""


class AlignedRows(TorchDataset[Rows]):
    """The rows of a run by number, over all its epochs.

    Attributes:
        datasets: each one's rows, in order.
        plan: the dataset of each row.
        rules: a row's shape.
        layout: its fields.
    """

    def __init__(
        self,
        config: StreamConfig,
        saved: StreamState | None = None,
        *,
        opened: OpenedRun | None = None,
    ) -> None:
        """Open a dataset or a mixture, and load or make the plans.

        Args:
            config: the options.
            saved: a resumed run's state; grown data are opened as they were. `restore` then sets
                the position.
            opened: the data, if already open, with the seed and epochs of `config`.

        Raises:
            DatasetError: damage that is not to be quarantined, parts that share documents, or chats
                of which nothing is learned.
            ForeignLossesError: stored losses are incomplete, of other rows, or of several teachers.
            WhereError: a condition matches no document.
            ValueError: impossible configuration. Also the errors of `open_run`.

        Example:
            >>> rows = AlignedRows(StreamConfig("aligned", seq_length=8))  # doctest: +SKIP
        """
        if not isinstance(config, StreamConfig):
            raise ValueError(f"{config!r} isn't a StreamConfig: give StreamConfig({config!r})")
        self.config = config
        self._locks: dict[int, Lock] = {}
        self.opened = opened or open_run(
            config.reading, saved, seed=config.seed, max_epochs=config.num_epochs
        )
        self.rules = PackingRules.of_dataset(
            self.opened.manifest,
            seq_length=config.seq_length,
            teacher_seq_length=config.teacher_seq_length,
            window_rows=config.window_rows,
            one_document_a_row=config.one_document_a_row,
        )
        mixture = self.opened.mixture
        self.datasets = tuple(
            DatasetRows(config, each, self.rules, seed=mixture.seed)
            for each in self.opened.datasets
        )
        self.opened.require_no_overlap([rows.plan.segments["document"] for rows in self.datasets])
        _require_one_teacher(mixture, self.datasets, config)
        self.plan = _plan(mixture, self.datasets)
        entries = self.teachers_rule.shape if config.with_distributions else None
        self.layout = RowLayout(
            self.rules.seq_length,
            self.rules.teacher_seq_length,
            max(rows.plan.max_segments for rows in self.datasets),
            with_losses=config.teaching.stored_losses is not None,
            entries=entries or NO_ENTRIES,
            sources=mixture.names,
            of_chats=any(rows.opened.dataset.manifest.chats for rows in self.datasets),
        )
        num_rows = _NO_END if self.plan.num_rows is None else self.plan.num_rows
        # Python's own lengths end at 2**63.
        self._num_rows = whole_batches(min(num_rows, _NO_END), config.global_batch_size)

    def __len__(self) -> int:
        """Rows of the run, whole global batches; about 2**62 if it is endless."""
        return self._num_rows

    def __getitem__(self, run_position: int) -> Rows:
        """Return one row.

        Raises:
            IndexError: past the run's end.
            DatasetError: damage that is not to be quarantined.
        """
        return Rows(self.__getitems__([run_position]).buffer[0], self.layout)

    def __getitems__(self, run_positions: Sequence[int]) -> Rows:
        """Return a batch, one tensor; a DataLoader calls this."""
        buffer = torch.empty((len(run_positions), self.layout.num_words), dtype=torch.int32)
        self.read_into(buffer, run_positions)
        return Rows(buffer, self.layout)

    def read_into(self, buffer: torch.Tensor, run_positions: Sequence[int]) -> None:
        """Write a batch into given memory, int32 [len(run_positions), layout.num_words]."""
        with self._lock():
            for row, run_position in zip(buffer.numpy(), run_positions, strict=True):
                source, epoch, epoch_position = self.locate(run_position)
                self.datasets[source].write_row(row, self.layout, epoch, epoch_position)
                if self.layout.sources:
                    row[self.layout.words["source"]] = source

    def _lock(self) -> Lock:
        """Return the lock of this process: a forked one's copy may be held by nobody."""
        return self._locks.setdefault(os.getpid(), Lock())

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_locks": {}}

    @property
    def dataset(self) -> Dataset:
        """The dataset whose tokenizers all share."""
        return self.opened.dataset

    @property
    def manifest(self) -> Manifest:
        """The manifest of `dataset`, with the run's tokens around texts."""
        return self.opened.manifest

    @property
    def samples_per_epoch(self) -> int:
        """As in `StreamState`."""
        return sum(source.num_rows for source in self.plan.sources)

    @property
    def teachers_rule(self) -> TeachersRule:
        """What determined the stored losses; empty without any."""
        return self.datasets[0].teachers_rule

    @property
    def cells_digest(self) -> str:
        """64 hex digits of the student's cells, "" if the method needs none."""
        if not self.config.with_cells:
            return ""
        cells = vocabulary_map(self).cells
        assert cells is not None
        return cells.digest

    def state(self, consumed_samples: int) -> StreamState:
        """Return the data's part of a checkpoint."""
        return StreamState(
            fingerprint=self.opened.fingerprint,
            seq_length=self.rules.seq_length,
            teacher_seq_length=self.rules.teacher_seq_length,
            rules=self.rules.fingerprint,
            seed=self.opened.mixture.seed,
            shuffle_shards=self.config.shuffle_shards,
            samples_per_epoch=self.samples_per_epoch,
            consumed_samples=consumed_samples,
            where=self.config.reading.where.strip(),
            scores=self.opened.scores_digest,
            cells=self.cells_digest,
            generations=self.opened.generations,
            global_batch_size=self.config.global_batch_size,
            teachers=self.teachers_rule.fingerprint if self.teachers_rule.rules else "",
        )

    def restore(self, saved: StreamState) -> int:
        """Return the number of samples that a checkpoint's run has consumed.

        Raises:
            StreamMismatchError: data, plan, order or batch size differ.

        Example:
            >>> rows.restore(rows.state(96))
            96
        """
        self.state(0).require_same_run(saved, moves_on=self.opened.moves_on(saved))
        return saved.consumed_samples

    def leave_out(self, run_position: int, segment: int, what: str) -> None:
        """List a segment's document as unusable; the caller masks its tokens.

        `segment` is its place in the row, `what` the faulty part, such as a teacher's loss.

        Raises:
            NonFiniteLossError: damage is not to be quarantined; names document, shard and step.
        """
        source, epoch, epoch_position = self.locate(run_position)
        step = run_position // self.config.global_batch_size + 1
        with self._lock():
            self.datasets[source].leave_out(epoch, epoch_position, segment, what, step=step)

    def locate(self, run_position: int) -> tuple[int, int, int]:
        """Return a row's dataset, its epoch, and its place there; IndexError past the run's end."""
        if not 0 <= (run_position := index(run_position)) < self._num_rows:
            more = f"raise num_epochs or, of a mixture, max_epochs in {self.opened.mixture.path}"
            raise IndexError(
                f"row {run_position} is not in 0 … {self._num_rows - 1}: "
                f"{'count from the first' if run_position < 0 else more}"
            )
        source, position = self.plan.locate(run_position)
        return source, *divmod(position, self.plan.sources[source].num_rows)


def _plan(mixture: Mixture, datasets: Sequence[DatasetRows]) -> MixturePlan:
    sources = [
        Source(
            rows.opened.entry.name,
            rows.num_rows,
            rows.num_student_tokens,
            rows.opened.entry.max_epochs,
        )
        for rows in datasets
    ]
    return plan_mixture(sources, mixture.stages)


def _require_one_teacher(
    mixture: Mixture, datasets: Sequence[DatasetRows], config: StreamConfig
) -> None:
    first, *others = (rows.teachers_rule for rows in datasets)
    as_read = methodcaller("as_read", with_distributions=config.with_distributions)
    for entry, rule in zip(mixture.datasets[1:], others, strict=True):
        if as_read(rule) != as_read(first):
            raise ForeignLossesError(
                f'{mixture.path}: the stored losses of "{entry.name}" and of '
                f'"{mixture.datasets[0].name}" come from two teachers or conventions '
                f"({rule.fingerprint[:16]}… and {first.fingerprint[:16]}…): name one teacher that "
                "has scored all datasets"
            )
