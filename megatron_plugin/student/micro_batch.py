"""From rows to micro-batches on the device.

Only here are `input_ids` called `tokens`, as in Megatron.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_plugin.bridge import TeacherRows
from megatron_plugin.models.attention import RowSegments, row_segments
from megatron_plugin.models.places import RowShare
from pipeline.losses.divergences import LabelDistributions
from pipeline.losses.spans import check_spans
from pipeline.streaming import Rows


@dataclass(frozen=True)
class Taught:
    """A teacher's answer for a micro-batch.

    Attributes:
        losses: fp32 [rows, teacher_seq_length], nats, NaN for tokens without a loss.
        next_tokens: whole rows' distributions for labels; None if the method needs none.
        waited_seconds: the student's wait for it; None without a running teacher.
    """

    losses: Tensor
    next_tokens: LabelDistributions | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Rows in Megatron's form.

    Attributes:
        number: in the run, the same on all data-parallel replicas.
        run_positions: each row's place in the run, over all epochs.
        tokens: int64 [rows, this rank's places].
        labels: int64 [rows, this rank's places], already shifted.
        loss_mask: float32 [rows, seq_length].
        position_ids: int64 [rows, this rank's places].
        segments: the documents' bounds.
        num_quarantined: int32 [rows], tokens masked for damage.
        rows: as read, on the CPU.
        moved: the same on the device.
        widest_span: in teacher tokens.
        of_validation: whether it is held out.
        taught: None without a teacher and on ranks that compute no loss.
    """

    number: int
    run_positions: tuple[int, ...]
    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    segments: RowSegments
    num_quarantined: Tensor
    rows: Rows
    moved: Rows
    widest_span: int
    of_validation: bool = False
    taught: Taught | None = None

    @property
    def next_tokens(self) -> LabelDistributions | None:
        """A teacher's distribution for each label, if any."""
        return None if self.taught is None else self.taught.next_tokens


def micro_batch(
    rows: Rows,
    number: int,
    run_positions: tuple[int, ...],
    *,
    device: torch.device,
    share: RowShare,
    of_validation: bool = False,
) -> MicroBatch:
    """Move rows to the device, with the rank's own places for its model."""
    moved = rows.to(device, non_blocking=True)
    seq_length = rows["input_ids"].shape[1]
    return MicroBatch(
        number=number,
        run_positions=run_positions,
        tokens=share.take(moved["input_ids"].long()),
        labels=share.take(moved["labels"].long()),
        loss_mask=moved["loss_mask"],
        position_ids=share.take(moved["position_ids"].long()),
        segments=row_segments(rows["cu_seqlens"], seq_length, device, share),
        num_quarantined=moved["num_quarantined_tokens"],
        rows=rows,
        moved=moved,
        # Looked at here, where it needs no waiting for the device.
        widest_span=check_spans(rows["teacher_input_ids"], rows["teacher_spans"]),
        of_validation=of_validation,
    )


def teacher_rows(batches: list[MicroBatch]) -> TeacherRows:
    """Return the teacher's side of micro-batches, one after the other."""
    return TeacherRows(
        torch.cat([batch.rows["teacher_input_ids"] for batch in batches]),
        torch.cat([batch.rows["teacher_cu_seqlens"] for batch in batches]),
    )
