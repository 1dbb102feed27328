"""Training rows for two models at once, as a map-style torch Dataset.

Row i of a run is row `order(epoch, epoch_position)` of the plan, where `epoch, epoch_position =
divmod(i, samples_per_epoch)`: pure arithmetic, so that a run resumes exactly from the number of
samples it has consumed, with any number of replicas and DataLoader workers.

A row holds segments of documents side by side. The text "abcd", student tokens [ab, cd] = [11, 12],
teacher tokens [a, bc, d] = [21, 22, 23], student with BOS 1 and EOS 2, teacher with context 9, in
a row of 6 student and 6 teacher tokens:

    place                  0       1       2      3       4       5
    input_ids              1       11      12     2       0       0
    labels                 11      12      2      0       0       0
    loss_mask              1       1       1      0       0       0
    position_ids           0       1       2      3       0       1
    teacher_spans          [1,3)   [2,4)   empty  empty   empty   empty
    teacher_input_ids      9       21      22     23      0       0
    teacher_position_ids   0       1       2      3       0       1
    cu_seqlens             0 4 6   teacher_cu_seqlens   0 4 6

- `labels[t] = input_ids[t + 1]` within a segment. The last token of a segment predicts nothing,
  and no token predicts across documents: `loss_mask` is 0 there and at padding.
- `teacher_spans[t]` belongs to the label: the half-open range of the row's teacher tokens that
  cover student token t + 1. The teacher's loss of `labels[t]` is therefore aggregated over
  `teacher_losses[start:stop]`, where entry l is the loss of teacher token l given those before it
  in its segment. Place 0 above predicts "ab", which "a" and "bc" cover: teacher places 1 and 2.
- Unmapped (0, 0): the label is EOS, padding, or a token that no teacher token covers.
- A teacher token whose position is 0 has no context and no loss; it is the context token, or the
  text's first token where the convention has none.
- With `StreamConfig.stored_losses` a row also holds `teacher_losses`, which `beam_jobs.score` has
  stored: in the row above [NaN, -log P(a | 9), -log P(bc | 9 a), -log P(d | 9 a bc), NaN, NaN].
- `cu_seqlens` are segment bounds, the padding last as a segment of its own; the array is filled up
  with the row's length, which makes empty segments.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from numpy import float32, int32, int64, nan
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset

from pipeline.dataset.cache import ShardCache
from pipeline.dataset.files import Dataset
from pipeline.guidance import NonFiniteLossError
from pipeline.packing.order import RowOrder, order_rows
from pipeline.packing.plan import ENDS, FORCED, STARTS
from pipeline.packing.rules import PackingRules
from pipeline.packing.saved_plans import load_plan, plan_folder
from pipeline.scoring.stored_losses import StoredLosses, open_stored_losses
from pipeline.streaming.batch import Rows, collate_rows
from pipeline.streaming.config import StreamConfig
from pipeline.streaming.damage import DamageLog
from pipeline.streaming.generations import LATEST, moves_on, open_generation
from pipeline.streaming.kernels import fill_nothing, fill_segment, finish_row
from pipeline.streaming.layout import SEGMENT, STUDENT, TEACHER, RowLayout
from pipeline.streaming.samples import SampleReader
from pipeline.streaming.state import StreamMismatchError, StreamState
from schemas.errors import DatasetError
from schemas.sidecar import TeacherRule

__all__ = [
    "AlignedRows",
    "Rows",
    "StreamConfig",
    "StreamMismatchError",
    "StreamState",
    "collate_rows",
]


class AlignedRows(TorchDataset[Rows]):
    """The rows of a run by number, over all its epochs.

    Attributes:
        config: what it was opened with.
        dataset: its files.
        manifest: the dataset's.
        plan: its rows.
        layout: the fields of a row.
        order: the rows' order.
        samples_per_epoch: rows of an epoch, whole global batches.
        num_student_tokens: of the documents in the plan.
        damage: what was left out in this process, and the file that lists it.
    """

    def __init__(self, config: StreamConfig, saved: StreamState | None = None) -> None:
        """Open a dataset, compare its shards with the manifest, and load or make its plan.

        Args:
            config: what is read, and how.
            saved: the state of the run that goes on: where the dataset has grown since, it is
                opened as it was.

        Raises:
            DatasetError: no finished dataset, or damage that is not to be quarantined.
            ForeignLossesError: stored losses that are incomplete or don't belong to these rows.
            ValueError: impossible configuration.

        Example:
            >>> rows = AlignedRows(StreamConfig(path="aligned", seq_length=2048))  # doctest: +SKIP
        """
        self.dataset = dataset = open_generation(config.path, config.generation, saved)
        self.manifest = config.choose_conventions(dataset)
        rules, where = config.rules(self.manifest), config.where.strip()
        self.config = config
        self.plan, table = load_plan(dataset, rules, cache_folder=config.cache_folder, where=where)
        self.layout = RowLayout(
            rules.seq_length,
            rules.teacher_seq_length,
            self.plan.max_segments,
            with_losses=config.stored_losses is not None,
        )
        self.order = order_rows(
            self.plan,
            " ".join(filter(None, (dataset.manifest.fingerprint, rules.fingerprint, where))),
            seed=config.seed,
            shuffle_shards=config.shuffle_shards,
        )
        self.samples_per_epoch = whole_batches(len(self.plan), config.global_batch_size)
        if where or not dataset.is_whole:
            self.num_student_tokens, _ = self.plan.num_text_tokens
        else:
            self.num_student_tokens = int(table.num_student_tokens.sum(dtype=int64))
        self.damage = DamageLog(config.on_damage, _quarantine_file(config, dataset, rules))
        cache = _shard_cache(config, dataset, self.order)
        self._reader = SampleReader(dataset, table, cache)
        self._losses: StoredLosses | None = None
        if config.stored_losses is not None:
            self._losses = open_stored_losses(
                config.stored_losses, dataset, self.plan, cache=cache, where=where
            )
        self._prefetched = (-1, -1)
        self._added = [_added_tokens(rules, flags) for flags in range((STARTS | ENDS) + 1)]
        for shard, error in dataset.find_damage(hashes=config.check_hashes).items():
            if config.on_damage == "raise":
                raise error
            self._reader.give_up(shard, error)

    def __len__(self) -> int:
        """Return the rows of all epochs."""
        return self.samples_per_epoch * self.config.num_epochs

    def __getitem__(self, run_position: int) -> Rows:
        """Return one row.

        Raises:
            IndexError: past the last epoch.
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
        for row, run_position in zip(buffer.numpy(), run_positions, strict=True):
            self.write_row(row, run_position)

    def write_row(self, row: NDArray[int32], run_position: int) -> None:
        """Write one row into memory that exists: int32 [layout.num_words]."""
        if not 0 <= run_position < len(self):
            raise IndexError(f"row {run_position} is not in 0 … {len(self) - 1}; raise num_epochs")
        epoch, epoch_position = divmod(run_position, self.samples_per_epoch)
        self._prefetch(epoch, epoch_position)
        row_index = self.order.row_index(epoch, epoch_position)
        start, stop = self.plan.row_starts[row_index : row_index + 2].tolist()
        at, num_quarantined = (0, 0, 0), 0
        if self._losses is not None:
            row[self.layout.starts["teacher_losses"] :].view(float32).fill(nan)
        for segment in self.plan.segments[start:stop].tolist():
            at, num_masked = self._fill_segment(row, at, segment)
            num_quarantined += num_masked
        finish_row(row, self.layout.kernel_starts, at, num_quarantined)

    def use_layout(self, layout: RowLayout) -> None:
        """Write rows as wide as those of other datasets that this one is mixed with.

        Args:
            layout: of the same lengths, with room for as many segments at least.
        """
        self.layout = layout

    @property
    def rules(self) -> PackingRules:
        """What a row is."""
        return self.plan.rules

    @property
    def teacher_rule(self) -> TeacherRule | None:
        """What determined the stored losses that rows hold; None where they hold none."""
        return None if self._losses is None else self._losses.scores.manifest.rule

    def state(self, consumed_samples: int) -> StreamState:
        """Return what a checkpoint keeps of the data."""
        return StreamState(
            fingerprint=self.manifest.fingerprint,
            seq_length=self.rules.seq_length,
            teacher_seq_length=self.rules.teacher_seq_length,
            rules=self.rules.fingerprint,
            seed=self.config.seed,
            shuffle_shards=self.config.shuffle_shards,
            samples_per_epoch=self.samples_per_epoch,
            consumed_samples=consumed_samples,
            where=self.config.where.strip(),
            generations=(self.manifest.generation,),
        )

    def restore(self, saved: StreamState) -> int:
        """Return the samples that a checkpoint's run has consumed.

        Raises:
            StreamMismatchError: other data, plan, order or batch size than the checkpoint's.

        Example:
            >>> rows.restore(rows.state(96))
            96
        """
        self.state(0).require_same_run(
            saved,
            global_batch_size=self.config.global_batch_size,
            moves_on=moves_on(self.dataset, saved, may_move=self.config.generation == LATEST),
        )
        return saved.consumed_samples

    def leave_out(
        self, run_position: int, segment: int, what: str, *, step: int | None = None
    ) -> None:
        """Raise for a segment of a row that can't be learned from, or list its document.

        Whoever calls masks the segment's tokens where this doesn't raise.

        Args:
            run_position: the row's place in the run, over all epochs.
            segment: its place in the row.
            what: is wrong, such as a teacher's loss.
            step: where the row's place says nothing of it, as in a mixture's dataset.

        Raises:
            NonFiniteLossError: damage is not to be quarantined; names document, shard and step.

        Example:
            >>> rows.leave_out(96, 0, "the teacher's loss at place 7 of the row is NaN")
        """
        row_index = self.order.row_index(*divmod(run_position, self.samples_per_epoch))
        document_index = int(
            self.plan.segments["document"][self.plan.row_starts[row_index] + segment]
        )
        step = step or run_position // self.config.global_batch_size + 1
        named = self._reader.describe(document_index, ValueError(what))
        error = NonFiniteLossError(
            f"{what} (document {json.dumps(named.document_id)}, sample {named.key} in "
            f"{named.shard}, step {step} on {self.config.path}): the model that gave it is broken, "
            'or overflows on this text; mend it, or leave such documents out by "quarantine"'
        )
        self.damage.note(document_index, replace(named, reason=str(error)), error)

    def _fill_segment(
        self, row: NDArray[int32], at: tuple[int, int, int], segment: tuple[int, ...]
    ) -> tuple[tuple[int, int, int], int]:
        """Write one segment; return where the next one starts and the student tokens masked."""
        document_index, s_start, s_stop, t_start, t_stop, flags = segment
        whole = STARTS | ENDS
        added = self._added[flags & whole]
        stop = (
            at[STUDENT] + s_stop - s_start + added.student,
            at[TEACHER] + t_stop - t_start + added.teacher,
        )
        num_masked = 0
        try:
            sample, tensors = self._reader.locate(document_index, keep=flags & whole != whole)
            num_bad = fill_segment(
                row,
                self.layout.kernel_starts,
                at,
                sample,
                tensors,
                (s_start, s_stop, t_start, t_stop),
                added.ids,
                bool(flags & FORCED),
            )
            if num_bad:
                raise self._reader.contradiction(
                    document_index, f"{num_bad} spans leave their segment"
                )
        except DatasetError as error:
            self.damage.note(document_index, self._reader.describe(document_index, error), error)
            fill_nothing(row, self.layout.kernel_starts, at, stop)
            num_masked = s_stop - s_start
        else:
            if self._losses is not None:
                # They come after the context token and, since no end token has one, end at `stop`.
                end = self.layout.starts["teacher_losses"] + stop[TEACHER]
                losses = row[end - (t_stop - t_start) : end].view(float32)
                losses[:] = self._losses.read(document_index, t_start, t_stop)
        return (*stop, at[SEGMENT] + 1), num_masked

    def _prefetch(self, epoch: int, epoch_position: int) -> None:
        """Fetch this group's shards and the next group's when a group is entered."""
        if not self._reader.is_remote:
            return
        place, group, _ = self.order.locate(epoch, epoch_position)
        if self._prefetched == (epoch, place):
            return
        self._prefetched = (epoch, place)
        following = self.order.group_at(epoch, place + 1)
        for wanted in (group, following):
            if wanted is not None:
                self._reader.prefetch(self.order.group_shards[wanted])
                if self._losses is not None:
                    self._losses.prefetch(self.order.group_shards[wanted])


def whole_batches(num_rows: int, global_batch_size: int) -> int:
    """Return the rows that fill whole global batches.

    Raises:
        ValueError: not even one.
    """
    samples = num_rows // global_batch_size * global_batch_size
    if not samples:
        raise ValueError(
            f"the data has {num_rows} rows, less than one global batch of {global_batch_size}: "
            "lower global_batch_size or seq_length, or align more documents"
        )
    return samples


def _quarantine_file(config: StreamConfig, dataset: Dataset, rules: PackingRules) -> Path:
    beside = plan_folder(dataset, rules, cache_folder=config.cache_folder, where=config.where)
    return config.quarantine_file or beside.with_suffix(".quarantine.jsonl")


def _shard_cache(config: StreamConfig, dataset: Dataset, order: RowOrder) -> ShardCache | None:
    """Return the cache of a remote dataset, large enough for two groups of shards."""
    if dataset.is_local:
        return None
    sizes = [record.num_bytes for record in dataset.manifest.shards]
    largest = max(sum(sizes[shard] for shard in shards) for shards in order.group_shards)
    if 2 * largest > config.cache_bytes:
        raise ValueError(
            f"cache_bytes {config.cache_bytes} is below {2 * largest}, two groups of "
            f"shuffle_shards {config.shuffle_shards} shards: raise it or lower shuffle_shards"
        )
    return ShardCache(config.cache_folder / "shards", config.cache_bytes)


@dataclass(frozen=True)
class _Added:
    """What is added to a segment: ids as `fill_segment` takes them, and their numbers."""

    ids: tuple[int, int, int, int]
    student: int
    teacher: int


def _added_tokens(rules: PackingRules, flags: int) -> _Added:
    """Return what is added to a segment that starts or ends its document, or does not."""
    ids: list[int] = []
    for convention in (rules.student, rules.teacher):
        first, after = convention.first_token_id, convention.continued_token_id
        before = first if flags & STARTS else after
        end = convention.end_token_id if flags & ENDS else None
        ids += [-1 if token is None else token for token in (before, end)]
    num_added = [int(token >= 0) for token in ids]
    return _Added((ids[0], ids[1], ids[2], ids[3]), sum(num_added[:2]), sum(num_added[2:]))
