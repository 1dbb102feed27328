"""Training rows for two models at once, as a map-style torch Dataset.

Sample i of a run is row `order(epoch, position)` of the plan, where `epoch, position =
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
- `cu_seqlens` are segment bounds, the padding last as a segment of its own; the array is filled up
  with the row's length, which makes empty segments.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from pipeline.damage import DamageLog, OnDamage
from pipeline.dataset_files import DatasetFiles, open_dataset
from pipeline.order import ReplicaBatches, RowOrder, order_rows
from pipeline.packing import (
    ENDS,
    FORCED,
    STARTS,
    Convention,
    PackingRules,
    suggest_teacher_seq_length,
)
from pipeline.plan_cache import load_plan, plan_folder
from pipeline.rows import RowLayout, fill_nothing, fill_segment
from pipeline.samples import SampleReader
from pipeline.shard_cache import ShardCache
from pipeline.stream_state import StreamState
from schemas.errors import DatasetError
from schemas.manifest import Manifest

_FLOAT_FIELDS = ("loss_mask",)


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


class Rows(Mapping[str, torch.Tensor]):
    """One row or a batch of rows: a mapping of tensors that all lie in one.

    Fields, for B rows (without B for one row); the module's docstring defines them:
        input_ids, labels, position_ids: int32 [B, seq_length].
        loss_mask: float32 [B, seq_length], 0 or 1.
        teacher_spans: int32 [B, seq_length, 2].
        teacher_input_ids, teacher_position_ids: int32 [B, teacher_seq_length].
        cu_seqlens, teacher_cu_seqlens: int32 [B, max_segments + 2].
        num_quarantined_tokens: int32 [B], student tokens masked because their sample is damaged.
    """

    def __init__(self, buffer: torch.Tensor, layout: RowLayout) -> None:
        """View `buffer`, int32 [..., layout.num_words]."""
        self.buffer = buffer
        self.layout = layout

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field, a view."""
        shape = self.layout.shapes.get(name)
        if shape is None:
            raise KeyError(
                f"no field {name!r} but {', '.join(self)}; a DataLoader needs "
                "collate_fn=pipeline.streaming.collate_rows"
            )
        start = self.layout.starts[name]
        words = self.buffer[..., start : start + int(np.prod(shape))]
        if name in _FLOAT_FIELDS:
            words = words.view(torch.float32)
        return words.view((*words.shape[:-1], *shape))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the fields' names."""
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(self.layout.shapes)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Rows":
        """Return the rows on a device, moved as one tensor."""
        return Rows(self.buffer.to(device, non_blocking=non_blocking), self.layout)

    def pin_memory(self) -> "Rows":
        """Return the rows in page-locked memory; a DataLoader calls this."""
        return Rows(self.buffer.pin_memory(), self.layout)


class AlignedRows(Dataset[Rows]):
    """The samples of a run by number, over all its epochs.

    Attributes:
        config: what it was opened with.
        manifest: the dataset's.
        plan: its rows.
        layout: the fields of a row.
        order: the rows' order.
        samples_per_epoch: rows of an epoch, whole global batches.
        damage: what was left out in this process, and the file that lists it.
    """

    def __init__(self, config: StreamConfig) -> None:
        """Open a dataset, compare its shards with the manifest, and load or make its plan.

        Raises:
            DatasetError: no finished dataset, or damage that is not to be quarantined.
            ValueError: impossible configuration.

        Example:
            >>> rows = AlignedRows(StreamConfig(path="OUTPUT", seq_length=2048))
        """
        files = open_dataset(config.path)
        rules = config.rules(files.manifest)
        self.config = config
        self.manifest = files.manifest
        self.plan, table = load_plan(files, rules, cache_folder=config.cache_folder)
        self.layout = RowLayout(rules.seq_length, rules.teacher_seq_length, self.plan.max_segments)
        self.order = order_rows(
            self.plan,
            f"{files.manifest.fingerprint} {rules.fingerprint}",
            seed=config.seed,
            shuffle_shards=config.shuffle_shards,
        )
        self.samples_per_epoch = _whole_batches(len(self.plan), config.global_batch_size)
        self.damage = DamageLog(config.on_damage, _quarantine_file(config, files, rules))
        self._reader = SampleReader(files, table, _shard_cache(config, files, self.order))
        self._prefetched = (-1, -1)
        self._student_added = _added_ids(rules.student)
        self._teacher_added = _added_ids(rules.teacher)
        for shard, error in files.find_damage(hashes=config.check_hashes).items():
            if config.on_damage == "raise":
                raise error
            self._reader.give_up(shard, error)

    def __len__(self) -> int:
        """Return the samples of all epochs."""
        return self.samples_per_epoch * self.config.num_epochs

    def __getitem__(self, sample: int) -> Rows:
        """Return one row.

        Raises:
            IndexError: past the last epoch.
            DatasetError: the row's sample or shard is damaged and that is not to be quarantined.
        """
        buffer = torch.empty(self.layout.num_words, dtype=torch.int32)
        self._fill_row(buffer.numpy(), sample)
        return Rows(buffer, self.layout)

    def __getitems__(self, samples: Sequence[int]) -> Rows:
        """Return a batch, one tensor; a DataLoader calls this, and then `collate_rows`."""
        buffer = torch.empty((len(samples), self.layout.num_words), dtype=torch.int32)
        for row, sample in zip(buffer.numpy(), samples, strict=True):
            self._fill_row(row, sample)
        return Rows(buffer, self.layout)

    def state(self, consumed_samples: int) -> StreamState:
        """Return what a checkpoint keeps of the data."""
        rules = self.plan.rules
        return StreamState(
            fingerprint=self.manifest.fingerprint,
            seq_length=rules.seq_length,
            teacher_seq_length=rules.teacher_seq_length,
            rules=rules.fingerprint,
            seed=self.config.seed,
            shuffle_shards=self.config.shuffle_shards,
            samples_per_epoch=self.samples_per_epoch,
            consumed_samples=consumed_samples,
        )

    def restore(self, saved: StreamState) -> int:
        """Return the samples that a checkpoint's run has consumed.

        Raises:
            StreamMismatchError: other data, plan, order or batch size than the checkpoint's.

        Example:
            >>> rows.restore(rows.state(96))
            96
        """
        self.state(0).require_same_run(saved, global_batch_size=self.config.global_batch_size)
        return saved.consumed_samples

    def _fill_row(self, row: NDArray[np.int32], sample: int) -> None:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} is not in 0 … {len(self) - 1}; raise num_epochs")
        epoch, position = divmod(sample, self.samples_per_epoch)
        self._prefetch(epoch, position)
        number = self.order.row(epoch, position)
        start, stop = self.plan.row_starts[number : number + 2].tolist()
        at, bounds, num_quarantined = (0, 0), [(0, 0)], 0
        for segment in self.plan.segments[start:stop].tolist():
            at, num_masked = self._fill_segment(row, at, segment)
            bounds.append(at)
            num_quarantined += num_masked
        self._finish_row(row, bounds, num_quarantined)

    def _fill_segment(
        self, row: NDArray[np.int32], at: tuple[int, int], segment: tuple[int, ...]
    ) -> tuple[tuple[int, int], int]:
        """Write one segment; return the next free places and the student tokens masked."""
        document, *tokens, flags = segment
        starts, ends = bool(flags & STARTS), bool(flags & ENDS)
        added = (*self._student_added[starts, ends], *self._teacher_added[starts, ends])
        try:
            bytes_, tensors = self._reader.locate(document, keep=not (starts and ends))
            student, teacher, num_bad = fill_segment(
                row,
                self.layout.kernel_starts,
                at,
                bytes_,
                tensors,
                (tokens[0], tokens[1], tokens[2], tokens[3]),
                added,
                bool(flags & FORCED),
            )
            if num_bad:
                raise self._reader.contradiction(document, f"{num_bad} spans leave their segment")
        except DatasetError as error:
            self.damage.note(document, self._reader.describe(document, error), error)
            student, teacher = _stops(at, tokens, added)
            fill_nothing(row, self.layout.kernel_starts, (at[0], student), (at[1], teacher))
            return (student, teacher), tokens[1] - tokens[0]
        return (student, teacher), 0

    def _finish_row(
        self, row: NDArray[np.int32], bounds: list[tuple[int, int]], num_quarantined: int
    ) -> None:
        """Write the padding, the segments' bounds and the count of masked tokens."""
        layout = self.layout
        ends = (layout.seq_length, layout.teacher_seq_length)
        student, teacher = bounds[-1]
        fill_nothing(row, layout.kernel_starts, (student, ends[0]), (teacher, ends[1]))
        for side, name in enumerate(("cu_seqlens", "teacher_cu_seqlens")):
            first = layout.starts[name]
            row[first : first + layout.max_segments + 2] = ends[side]
            row[first : first + len(bounds)] = [bound[side] for bound in bounds]
        row[layout.starts["num_quarantined_tokens"]] = num_quarantined

    def _prefetch(self, epoch: int, position: int) -> None:
        """Fetch this group's shards and the next group's when a group is entered."""
        if not self._reader.is_remote:
            return
        place, group, _ = self.order.locate(epoch, position)
        if self._prefetched == (epoch, place):
            return
        self._prefetched = (epoch, place)
        following = self.order.group_at(epoch, place + 1)
        for wanted in (group, following):
            if wanted is not None:
                self._reader.prefetch(self.order.group_shards[wanted])


def collate_rows(rows: Rows | Sequence[Rows]) -> Rows:
    """Return a batch as one contiguous tensor.

    Example:
        >>> batch = next(iter(DataLoader(rows, batch_size=4, collate_fn=collate_rows)))
        >>> batch["labels"].shape
        torch.Size([4, 2048])
    """
    if isinstance(rows, Rows):
        return rows
    return Rows(torch.stack([row.buffer for row in rows]), rows[0].layout)


def load_batches(
    rows: AlignedRows,
    *,
    micro_batch_size: int,
    replica: int = 0,
    num_replicas: int = 1,
    consumed_samples: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Rows]:
    """Return a DataLoader over one replica's micro-batches, from where a run stands.

    Args:
        rows: the samples.
        micro_batch_size: rows per batch.
        replica: this data-parallel replica's number.
        num_replicas: how many there are; may differ from the run's earlier part.
        consumed_samples: from `AlignedRows.restore`.
        num_workers: DataLoader processes; 0 reads in this one.
        pin_memory: whether batches lie in page-locked memory.

    Raises:
        ValueError: sizes that do not divide each other.

    Example:
        >>> for batch in load_batches(rows, micro_batch_size=4):
        ...     loss = step(batch.to("cuda"))
    """
    batches = ReplicaBatches(
        num_samples=len(rows),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        global_batch_size=rows.config.global_batch_size,
        replica=replica,
        num_replicas=num_replicas,
    )
    return DataLoader(
        rows,
        batch_sampler=batches,
        collate_fn=collate_rows,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )


def _whole_batches(num_rows: int, global_batch_size: int) -> int:
    samples = num_rows // global_batch_size * global_batch_size
    if not samples:
        raise ValueError(
            f"the dataset has {num_rows} rows, less than one global batch of {global_batch_size}: "
            "lower global_batch_size or seq_length, or align more documents"
        )
    return samples


def _quarantine_file(config: StreamConfig, files: DatasetFiles, rules: PackingRules) -> Path:
    beside = plan_folder(files, rules, cache_folder=config.cache_folder)
    return config.quarantine_file or beside.with_suffix(".quarantine.jsonl")


def _shard_cache(config: StreamConfig, files: DatasetFiles, order: RowOrder) -> ShardCache | None:
    """Return the cache of a remote dataset, large enough for two groups of shards."""
    if files.is_local:
        return None
    sizes = [record.num_bytes for record in files.manifest.shards]
    largest = max(sum(sizes[shard] for shard in shards) for shards in order.group_shards)
    if 2 * largest > config.cache_bytes:
        raise ValueError(
            f"cache_bytes {config.cache_bytes} is below {2 * largest}, two groups of "
            f"shuffle_shards {config.shuffle_shards} shards: raise it or lower shuffle_shards"
        )
    return ShardCache(config.cache_folder / "shards", config.cache_bytes)


def _added_ids(convention: Convention) -> dict[tuple[bool, bool], tuple[int, int]]:
    """Return the ids before and after a segment, -1 for none, by whether it starts and ends."""

    def id_or_none(token_id: int | None) -> int:
        return -1 if token_id is None else token_id

    context = (id_or_none(convention.continued_token_id), id_or_none(convention.first_token_id))
    end = (-1, id_or_none(convention.end_token_id))
    return {(bool(s), bool(e)): (context[s], end[e]) for s in (0, 1) for e in (0, 1)}


def _stops(
    at: tuple[int, int], tokens: Sequence[int], added: tuple[int, int, int, int]
) -> tuple[int, int]:
    """Return the places after a segment that starts at `at`."""
    num_added = [int(token >= 0) for token in added]
    return (
        at[0] + tokens[1] - tokens[0] + num_added[0] + num_added[1],
        at[1] + tokens[3] - tokens[2] + num_added[2] + num_added[3],
    )
