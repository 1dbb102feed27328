"""The rows of one dataset of a run, by epoch and position."""

import json
from dataclasses import replace

from numpy import int32, int64, uint8, zeros_like
from numpy.typing import NDArray

from pipeline.dataset.cache import ShardCache
from pipeline.dataset.chosen_documents import require_learned
from pipeline.dataset.files import Dataset
from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.packing.kernels import ENDS, FORCED, STARTS
from pipeline.packing.opening import OpenedDataset
from pipeline.packing.order import RowOrder, order_rows
from pipeline.packing.rules import PackingRules
from pipeline.packing.saved_plans import load_plan, plan_folder
from pipeline.scoring.stored_teachers import open_teachers
from pipeline.streaming.damage import DamageLog
from pipeline.streaming.kernels import fill_nothing, fill_segment, finish_row
from pipeline.streaming.layout import RowLayout
from pipeline.streaming.next_tokens import NextTokens, RowAnswers, TeacherLosses
from pipeline.streaming.samples import SampleReader
from pipeline.streaming.stream_config import StreamConfig
from schemas.errors import DatasetError


class DatasetRows:
    """The rows of an opened dataset.

    `num_rows` are an epoch's, `num_student_tokens` the planned documents'; `teachers_rule` is empty
    without stored losses.
    """

    def __init__(
        self, config: StreamConfig, opened: OpenedDataset, rules: PackingRules, *, seed: int
    ) -> None:
        """Load or make a dataset's plan; errors as in `AlignedRows`."""
        self.opened = opened
        dataset, where = opened.dataset, opened.documents.where
        self.plan, table = load_plan(opened.documents, rules, cache_folder=config.cache_folder)
        # A mixture reads its datasets' epochs whole; of one dataset each is cut to whole batches.
        # Before tokenizers and losses are opened, which takes longer.
        whole = 1 if opened.entry.name else config.global_batch_size
        column = "num_learned_bytes" if config.text_labels else "num_learned_student_tokens"
        require_learned(opened.documents, column)
        self.num_rows = whole_batches(len(self.plan), whole)
        self.order = order_rows(
            self.plan,
            " ".join(filter(None, (opened.fingerprint, rules.fingerprint, where))),
            seed=seed,
            shuffle_shards=config.shuffle_shards,
        )
        if opened.documents.is_whole:
            self.num_student_tokens = int(table.num_student_tokens.sum(dtype=int64))
        else:
            self.num_student_tokens, _ = self.plan.num_text_tokens
        plan = plan_folder(opened.documents, rules, cache_folder=config.cache_folder)
        self.damage = DamageLog(config.on_damage, plan.with_suffix(".quarantine.jsonl"))
        cache = _shard_cache(config, dataset, self.order)
        self._teachers = open_teachers(
            config.teaching,
            opened,
            self.plan,
            cache=cache,
            with_distributions=config.with_distributions,
        )
        self.teachers_rule = self._teachers.rule
        self._answers: list[RowAnswers] = []
        if self.teachers_rule.rules:
            self._answers.append(TeacherLosses(self._teachers))
        if config.with_distributions:
            self._answers.append(NextTokens(self._teachers, dataset, rules))
        self._is_remote = cache is not None
        self._prefetched = (-1, -1)
        manifest = dataset.manifest
        self._vocab_sizes = manifest.student.vocab_size, manifest.teacher.vocab_size
        self._is_chats, self._text_only = manifest.chats is not None, config.text_labels
        self._added = [_added_tokens(rules, flags) for flags in range((STARTS | ENDS) + 1)]
        damaged = dataset.find_damage()
        if damaged and config.on_damage == "raise":
            raise next(iter(damaged.values()))
        self._reader = SampleReader(dataset, table, cache, damaged)

    def write_row(
        self, row: NDArray[int32], layout: RowLayout, epoch: int, epoch_position: int
    ) -> None:
        """Write a row into `row`, int32 [layout.num_words]; DatasetError as in `AlignedRows`."""
        self._prefetch(epoch, epoch_position)
        row_index = self.order.row_index(epoch, epoch_position)
        start, stop = self.plan.row_starts[row_index : row_index + 2].tolist()
        at, num_quarantined = (0, 0, 0), 0
        for answers in self._answers:
            answers.begin(row, layout)
        for segment in self.plan.segments[start:stop].tolist():
            at, num_masked = self._fill_segment(row, layout, at, segment)
            num_quarantined += num_masked
        finish_row(row, layout.kernel_starts, at, num_quarantined)
        for answers in self._answers:
            answers.finish(row, layout)

    def leave_out(
        self, epoch: int, epoch_position: int, segment: int, what: str, *, step: int
    ) -> None:
        """See `AlignedRows.leave_out`."""
        row_index = self.order.row_index(epoch, epoch_position)
        document_index = int(
            self.plan.segments["document"][self.plan.row_starts[row_index] + segment]
        )
        named = self._reader.describe(document_index, ValueError(what))
        error = NonFiniteLossError(
            f"{what} (document {json.dumps(named.document_id)}, sample {named.key} in "
            f"{named.shard}, step {step} on {self.opened.entry.path}): the model that gave it is "
            "broken, or overflows on this text; fix it, or leave such documents out by "
            '"quarantine"'
        )
        self.damage.note(document_index, replace(named, reason=str(error)), error)

    def _fill_segment(
        self,
        row: NDArray[int32],
        layout: RowLayout,
        at: tuple[int, int, int],
        segment: tuple[int, ...],
    ) -> tuple[tuple[int, int, int], int]:
        """Write a segment; return the next one's start, and the student tokens masked."""
        document_index, s_start, s_stop, t_start, t_stop, flags = segment
        whole = STARTS | ENDS
        added = self._added[flags & whole]
        student, teacher, number = at
        stop = (
            student + s_stop - s_start + (added[0] >= 0) + (added[1] >= 0),
            teacher + t_stop - t_start + (added[2] >= 0) + (added[3] >= 0),
        )
        num_masked = 0
        try:
            sample, tensors = self._reader.locate(document_index, keep=flags & whole != whole)
            num_outside, num_unknown = fill_segment(
                row=row,
                starts=layout.kernel_starts,
                at=at,
                sample=sample,
                tensors=tensors,
                tokens=(s_start, s_stop, t_start, t_stop),
                added=added,
                vocab_sizes=self._vocab_sizes,
                forced=bool(flags & FORCED),
            )
            if num_outside or num_unknown:
                what = f"{num_outside} spans leave their segment"
                if num_unknown:
                    what = f"{num_unknown} token ids are outside the vocabulary"
                raise self._reader.contradiction(document_index, what)
            if self._is_chats:
                text_at = student + (added[0] >= 0)
                self._mask(
                    row, layout, document_index, sample, (student, text_at), stop[0], s_start
                )
        except DatasetError as error:
            self.damage.note(document_index, self._reader.describe(document_index, error), error)
            fill_nothing(row, layout.kernel_starts, at, stop)
            num_masked = s_stop - s_start
        else:
            places, ends = (teacher, stop[1]), bool(flags & ENDS)
            for answers in self._answers:
                answers.segment(document_index, (t_start, t_stop), places, ends=ends)
        return (*stop, number + 1), num_masked

    def _mask(
        self,
        row: NDArray[int32],
        layout: RowLayout,
        document_index: int,
        sample: NDArray[uint8],
        at: tuple[int, int],
        stop: int,
        first_token: int,
    ) -> None:
        """Keep only learned labels in a chat's segment, from `at[0]` to `stop`."""
        learned = self._reader.learned_tokens(document_index, sample, text_only=self._text_only)
        places = learned - first_token + at[1] - 1  # a label is at the token before
        loss_mask = layout.field(row, "loss_mask")
        kept = zeros_like(loss_mask[at[0] : stop])
        for first, end in (places.clip(at[0], stop) - at[0]).tolist():
            kept[first:end] = loss_mask[at[0] + first : at[0] + end]
        loss_mask[at[0] : stop] = kept

    def _prefetch(self, epoch: int, epoch_position: int) -> None:
        if not self._is_remote:
            return
        place, group, _ = self.order.locate(epoch, epoch_position)
        if self._prefetched == (epoch, place):
            return
        self._prefetched = (epoch, place)
        following = self.order.group_at(epoch, place + 1)
        for wanted in (group, following):
            if wanted is not None:
                self._reader.prefetch(self.order.group_shards[wanted])
                self._teachers.prefetch(self.order.group_shards[wanted])


def whole_batches(num_rows: int, global_batch_size: int) -> int:
    """Return the rows of whole batches; ValueError if there is none."""
    samples = num_rows // global_batch_size * global_batch_size
    if not samples:
        raise ValueError(
            f"the data has {num_rows} of the {global_batch_size} rows of one global batch: lower "
            "global_batch_size or seq_length, or align more documents"
        )
    return samples


def _shard_cache(config: StreamConfig, dataset: Dataset, order: RowOrder) -> ShardCache | None:
    """Return a remote dataset's cache, with room for two groups."""
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


def _added_tokens(rules: PackingRules, flags: int) -> tuple[int, int, int, int]:
    ids: list[int] = []
    for convention in (rules.student, rules.teacher):
        first, after = convention.first_token_id, convention.continued_token_id
        before = first if flags & STARTS else after
        end = convention.end_token_id if flags & ENDS else None
        ids += [-1 if token is None else token for token in (before, end)]
    return ids[0], ids[1], ids[2], ids[3]
