"""Put the teacher's losses into micro-batches; broken ones raise, or drop their document."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_plugin.bridge import TeacherAnswer
from megatron_plugin.models.copies import to_device
from megatron_plugin.student.micro_batch import MicroBatch, Taught, teacher_rows
from megatron_plugin.teacher.model import Teacher
from megatron_plugin.upstream import training
from pipeline.distributions.mapping import map_batch
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.losses.cell_sums import Cells
from pipeline.losses.divergences import LabelDistributions
from pipeline.methods.label_distributions import read_distributions
from schemas.distribution_rule import NO_ENTRIES, EntryShape

Batches = Iterator[MicroBatch]


@dataclass(frozen=True)
class Guide:
    """Gives micro-batches their guidance.

    `leave_out` is `AlignedRows.leave_out` by batch, row, segment and fault; `vocabulary_map` maps
    the teacher's tokens to the student's; `asked` are a running teacher's entries per place.
    """

    leave_out: Callable[[MicroBatch, int, int, str], None]
    vocabulary_map: Callable[[], VocabularyMap] | None = None
    asked: EntryShape = NO_ENTRIES
    uses_cells: bool = False

    @cached_property
    def cells(self) -> Cells | None:
        """Cells of both vocabularies, if needed."""
        if not self.uses_cells or self.vocabulary_map is None:
            return None
        cells = self.vocabulary_map().cells
        assert cells is not None
        return Cells.of(*cells)

    def read_answer(self, batches: list[MicroBatch], answer: TeacherAnswer) -> Tensor:
        """Return an answer for some batches' rows, mapped to the student's vocabulary."""
        if self.vocabulary_map is None or not self.asked.width:
            return answer.losses
        host = TeacherAnswer(answer.values.cpu())
        tables = self.vocabulary_map()
        sizes = [len(batch.tokens) for batch in batches]
        told = host.next_ids.int(), host.next_log_probs, host.losses
        asked = zip(batches, *(each.split(sizes) for each in told), strict=True)
        exact = self.asked.exact
        mapped = (
            map_batch(
                batch.rows, ids.numpy(), log_probs.numpy(), tables, losses.numpy(), exact=exact
            )
            for batch, ids, log_probs, losses in asked
        )
        found = (np.concatenate(each).astype(np.float32) for each in zip(*mapped, strict=True))
        return torch.cat((host.losses, *(torch.from_numpy(each).flatten(1) for each in found)), 1)

    def num_values(self, batch: MicroBatch) -> int:
        """Return the number of `read_answer`'s values per row."""
        of_label = 2 * self.asked.width + bool(self.asked.width)
        return batch.rows["teacher_input_ids"].shape[1] + of_label * batch.rows["labels"].shape[1]

    def by_teacher(
        self, batches: list[MicroBatch], values: Tensor, *, waited_seconds: float
    ) -> list[MicroBatch]:
        """Return micro-batches guided by a teacher's answer for all their rows.

        Values are fp32 [rows of all, `num_values`], on the device: losses in nats, each label's
        next tokens, their probabilities, and its own token. NonFiniteLossError for a broken loss,
        unless damage is quarantined.
        """
        waited = waited_seconds / len(batches)
        parts = values.split([len(batch.tokens) for batch in batches])
        taught = [
            replace(batch, taught=self._unpacked(batch, part, waited))
            for batch, part in zip(batches, parts, strict=True)
        ]
        broken = [_broken(batch) for batch in taught]
        # The host waits for the device once a step.
        are_broken = torch.stack([each.any() for each in broken]).tolist()
        return [
            self._examined(batch, own if is_broken else None)
            for batch, own, is_broken in zip(taught, broken, are_broken, strict=True)
        ]

    def by_stored(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch guided by its rows' stored losses."""
        known = None
        if "next_token_ids" in batch.moved:
            known = self._in_cells(read_distributions(batch.moved), batch)
        batch = replace(batch, taught=Taught(batch.moved["teacher_losses"], known))
        is_broken = bool(batch.rows["teacher_losses"].isinf().any())
        return self._examined(batch, _broken(batch) if is_broken else None)

    def _unpacked(self, batch: MicroBatch, values: Tensor, waited_seconds: float) -> Taught:
        places = batch.rows["teacher_input_ids"].shape[1]
        losses, others = values[:, :places], values[:, places:]
        if not self.asked.width:
            return Taught(losses, None, waited_seconds)
        labels = batch.rows["labels"].shape[1]
        entries, own_ids = others[:, :-labels], others[:, -labels:]
        ids, probs = entries.unflatten(1, (2, labels, self.asked.width)).unbind(1)
        found = LabelDistributions(ids.long(), probs, own_ids.long(), self.asked)
        return Taught(losses, self._in_cells(found, batch), waited_seconds)

    def _in_cells(self, known: LabelDistributions, batch: MicroBatch) -> LabelDistributions:
        if self.cells is None:
            return known
        return known.in_cells(self.cells, batch.moved["input_ids"])

    def _examined(self, batch: MicroBatch, broken: Tensor | None) -> MicroBatch:
        """Return a batch with NaN for undefined losses, and only sound documents."""
        taught, has_loss = batch.taught, batch.moved.teacher_has_loss
        assert taught is not None
        if broken is not None:
            batch, sound = self._without_broken(batch, broken)
            has_loss &= sound
        losses = taught.losses.masked_fill(~has_loss, torch.nan)
        return replace(batch, taught=replace(taught, losses=losses))

    def _without_broken(self, batch: MicroBatch, broken: Tensor) -> tuple[MicroBatch, Tensor]:
        """Leave out documents with broken losses; also return sound teacher tokens."""
        mask, quarantined = batch.loss_mask.clone(), batch.num_quarantined.clone()
        sound = torch.ones_like(broken)
        bounds, teacher_bounds = batch.rows["cu_seqlens"], batch.rows["teacher_cu_seqlens"]
        found: dict[tuple[int, int], int] = {}
        for row, place in broken.nonzero().tolist():
            segment = int(torch.searchsorted(teacher_bounds[row], place, right=True)) - 1
            found.setdefault((row, segment), place)
        for (row, segment), place in found.items():
            what = f"the teacher's loss at place {place} of the row is NaN or infinite"
            self.leave_out(batch, row, segment, what)
            start, stop = bounds[row, segment : segment + 2].tolist()
            quarantined[row] += int(mask[row, start:stop].sum())
            mask[row, start:stop] = 0
            start, stop = teacher_bounds[row, segment : segment + 2].tolist()
            sound[row, start:stop] = False
        return replace(batch, loss_mask=mask, num_quarantined=quarantined), sound


def _broken(batch: MicroBatch) -> Tensor:
    assert batch.taught is not None
    losses = batch.taught.losses
    return losses.isinf() | (batch.moved.teacher_has_loss & losses.isnan())


def score_steps_ahead(teacher: Teacher, guide: Guide) -> None:
    """Let a colocated teacher score each step before the student's schedule starts.

    Its pass must not mix with the student's messages between pipeline stages, and Megatron has no
    earlier hook than `training.get_forward_backward_func`.
    """
    original = training.get_forward_backward_func

    def wrapped(*given: Any, **named: Any) -> Callable[..., Any]:
        schedule = original(*given, **named)

        def run(*, data_iterator: Batches, num_microbatches: int, **others: Any) -> Any:
            # Megatron's iterators have only `__next__`.
            batches = [next(data_iterator) for _ in range(num_microbatches)]
            start = time.perf_counter()
            answer = teacher.score(teacher_rows(batches))
            if answer is not None:
                values = to_device(guide.read_answer(batches, answer), batches[0].tokens.device)
                waited = time.perf_counter() - start
                batches = guide.by_teacher(batches, values, waited_seconds=waited)
            return schedule(
                data_iterator=iter(batches), num_microbatches=num_microbatches, **others
            )

        return run

    training.get_forward_backward_func = wrapped
