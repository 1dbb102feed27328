"""From rows to micro-batches on the device, and the teacher's losses into them.

The only file where `input_ids` are Megatron's `tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_plugin.bridge import TeacherReply, TeacherRows
from megatron_plugin.models.attention import RowSegments, row_segments
from megatron_plugin.models.places import RowShare
from pipeline.guidance import Aggregation, NonFiniteLossError, aggregate_teacher_losses
from pipeline.guidance.loss import mapped_tokens
from pipeline.streaming import AlignedRows, Rows


@dataclass(frozen=True)
class Origin:
    """Where rows come from.

    Attributes:
        dataset: that read them.
        samples: each row's number in it.
    """

    dataset: AlignedRows
    samples: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Rows as Megatron takes them.

    Attributes:
        number: of the micro-batch in the run, the same on all data-parallel replicas.
        tokens: int64 [rows, this rank's places]; all seq_length of them without context
            parallelism.
        labels: int64 [rows, this rank's places], already shifted.
        loss_mask: float32 [rows, seq_length].
        position_ids: int64 [rows, this rank's places].
        segments: the documents' bounds.
        rows: as read, on the CPU.
        origin: where the rows come from.
        guidance: fp32 [rows, seq_length], nats, NaN = unmapped; None without a teacher and on ranks
            that compute no loss.
        reply: of the teacher, what guidance was made of; None where that is None.
    """

    number: int
    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    segments: RowSegments
    rows: Rows
    origin: Origin
    guidance: Tensor | None = None
    reply: TeacherReply | None = None

    def guided_by(self, reply: TeacherReply, how: Aggregation) -> MicroBatch:
        """Return the micro-batch with guidance from the losses of its teacher tokens.

        Args:
            reply: of the teacher for these rows, on the device.
            how: Φ.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite, and damage is not to be quarantined.
        """
        losses, device = reply.losses, reply.losses.device
        spans = self.rows["teacher_spans"].to(device)
        has_loss = self.rows.teacher_has_loss.to(device)
        mask = self.loss_mask
        try:
            guidance = aggregate_teacher_losses(losses, spans, how, teacher_loss_mask=has_loss)
        except NonFiniteLossError:
            mask, sound = self._leave_out(losses.isinf() | (has_loss & losses.isnan()))
            losses, has_loss = losses.masked_fill(~sound, torch.nan), has_loss & sound
            guidance = aggregate_teacher_losses(losses, spans, how, teacher_loss_mask=has_loss)
        reply = replace(reply, losses=losses.masked_fill(~has_loss, torch.nan))
        return replace(self, loss_mask=mask, guidance=guidance, reply=reply)

    def _leave_out(self, broken: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out the documents that hold broken losses, or raise, as the dataset is opened.

        Args:
            broken: bool [rows, teacher_seq_length].

        Returns:
            The loss mask without those documents, and bool [rows, teacher_seq_length]: the teacher
            tokens of the others.
        """
        mask, sound = self.loss_mask.clone(), torch.ones_like(broken)
        places = [self.rows[name] for name in ("cu_seqlens", "teacher_cu_seqlens")]
        found: dict[tuple[int, int], int] = {}
        for row, position in broken.nonzero().tolist():
            segment = int(torch.searchsorted(places[1][row], position, right=True)) - 1
            found.setdefault((row, segment), position)
        for (row, segment), position in found.items():
            self.origin.dataset.leave_out(
                self.origin.samples[row],
                segment,
                f"the teacher's loss at place {position} of the row is NaN or infinite",
            )
            (s_start, s_stop), (t_start, t_stop) = (
                bounds[row, segment : segment + 2].tolist() for bounds in places
            )
            self.rows["num_quarantined_tokens"][row] += int(mask[row, s_start:s_stop].sum())
            mask[row, s_start:s_stop] = 0
            sound[row, t_start:t_stop] = False
        return mask, sound

    def guided_by_stored(self, how: Aggregation) -> MicroBatch:
        """Return the micro-batch with guidance from the losses that its rows hold.

        Args:
            how: Φ.
        """
        # Not stored: padding, or a token without context. Others were counted when the rows were
        # opened.
        return self.guided_by(TeacherReply(self.rows["teacher_losses"].to(self.tokens.device)), how)

    def mapped(self) -> Tensor:
        """Return which labels a teacher token with a loss covers, bool [rows, seq_length]."""
        mapped = mapped_tokens(self.rows["teacher_spans"], self.rows.teacher_has_loss)
        return mapped.to(self.tokens.device)


def micro_batch(
    rows: Rows, number: int, device: torch.device, *, origin: Origin, share: RowShare
) -> MicroBatch:
    """Return rows as a micro-batch on the device, of which the rank's model sees its own places."""
    moved = rows.to(device, non_blocking=True)
    seq_length = rows["input_ids"].shape[1]
    return MicroBatch(
        number=number,
        tokens=share.take(moved["input_ids"].long()),
        labels=share.take(moved["labels"].long()),
        loss_mask=moved["loss_mask"],
        position_ids=share.take(moved["position_ids"].long()),
        segments=row_segments(rows["cu_seqlens"], seq_length, device, share),
        rows=rows,
        origin=origin,
    )


def teacher_rows(batches: list[MicroBatch]) -> TeacherRows:
    """Return the teacher's side of some micro-batches, one after the other."""
    return TeacherRows(
        torch.cat([batch.rows["teacher_input_ids"] for batch in batches]),
        torch.cat([batch.rows["teacher_cu_seqlens"] for batch in batches]),
    )


def guide(batches: list[MicroBatch], reply: TeacherReply, how: Aggregation) -> list[MicroBatch]:
    """Return micro-batches guided by the teacher's losses of all their rows.

    Args:
        batches: in the order in which `teacher_rows` took them.
        reply: of all their rows.
        how: Φ.
    """
    parts = reply.split([len(batch.tokens) for batch in batches])
    return [batch.guided_by(part, how) for batch, part in zip(batches, parts, strict=True)]
