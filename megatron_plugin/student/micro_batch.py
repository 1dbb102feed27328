"""Rows as micro-batches on the device.

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

    `losses` are fp32 [rows, teacher_seq_length], nats, NaN without a loss; `next_tokens` are whole
    rows' distributions for labels, None if the method needs none; `waited_seconds` is None without
    a running teacher.
    """

    losses: Tensor
    next_tokens: LabelDistributions | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Rows in Megatron's form.

    `tokens`, shifted `labels` and `position_ids` are int64 [rows, this rank's places], `loss_mask`
    is float32 [rows, seq_length], and `num_quarantined`, int32 [rows], counts tokens masked for
    damage. `number` and `run_positions` are in the run. `rows` are on the CPU, `moved` the same on
    the device. `taught` is None without a teacher and on ranks that compute no loss.
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
    """Move rows to the device, and take the rank's own places."""
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
        # On the CPU, without waiting for the device.
        widest_span=check_spans(rows["teacher_input_ids"], rows["teacher_spans"]),
        of_validation=of_validation,
    )


def teacher_rows(batches: list[MicroBatch]) -> TeacherRows:
    """Return micro-batches' teacher side."""
    return TeacherRows(
        torch.cat([batch.rows["teacher_input_ids"] for batch in batches]),
        torch.cat([batch.rows["teacher_cu_seqlens"] for batch in batches]),
    )
