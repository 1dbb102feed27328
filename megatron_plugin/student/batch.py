"""From rows to micro-batches on the device, and the teacher's losses into them.

The only file where `input_ids` are Megatron's `tokens`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_plugin.bridge import PendingScores, Scores, StudentBridge, TeacherRows
from megatron_plugin.models.attention import RowSegments, row_segments
from pipeline.guidance import Aggregation, NonFiniteLossError, aggregate_teacher_losses
from pipeline.guidance.loss import mapped_tokens
from pipeline.streaming import AlignedRows, Rows


@dataclass(frozen=True)
class ServiceTimes:
    """What waiting for the teacher cost, for one micro-batch.

    Attributes:
        waited_seconds: that the student stood still.
        num_tokens: teacher tokens scored.
        seconds: that scoring took.
    """

    waited_seconds: float = 0.0
    num_tokens: float = 0.0
    seconds: float = 0.0


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
        tokens: int64 [rows, seq_length].
        labels: int64 [rows, seq_length], already shifted.
        loss_mask: float32 [rows, seq_length].
        position_ids: int64 [rows, seq_length].
        segments: the documents' bounds.
        rows: as read, on the CPU.
        origin: where the rows come from.
        guidance: fp32 [rows, seq_length], nats, NaN = unmapped; None without a teacher and on ranks
            that compute no loss.
        teacher_losses: fp32 [rows, teacher_seq_length], nats, what guidance was made of; NaN for a
            token without a loss.
        times: of the teacher.
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
    teacher_losses: Tensor | None = None
    times: ServiceTimes = ServiceTimes()

    def guided_by(self, losses: Tensor, how: Aggregation, times: ServiceTimes) -> MicroBatch:
        """Return the micro-batch with guidance from the losses of its teacher tokens.

        Args:
            losses: fp32 [rows, teacher_seq_length], nats, on the device.
            how: Φ.
            times: of the teacher.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite, and damage is not to be quarantined.
        """
        device = losses.device
        spans = self.rows["teacher_spans"].to(device)
        has_loss = self.rows.teacher_has_loss.to(device)
        mask = self.loss_mask
        try:
            guidance = aggregate_teacher_losses(losses, spans, how, teacher_loss_mask=has_loss)
        except NonFiniteLossError:
            mask, sound = self._leave_out(losses.isinf() | (has_loss & losses.isnan()))
            losses, has_loss = losses.masked_fill(~sound, torch.nan), has_loss & sound
            guidance = aggregate_teacher_losses(losses, spans, how, teacher_loss_mask=has_loss)
        losses = losses.masked_fill(~has_loss, torch.nan)
        return replace(self, loss_mask=mask, guidance=guidance, teacher_losses=losses, times=times)

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
        return self.guided_by(
            self.rows["teacher_losses"].to(self.tokens.device), how, ServiceTimes()
        )

    def mapped(self) -> Tensor:
        """Return which labels a teacher token with a loss covers, bool [rows, seq_length]."""
        mapped = mapped_tokens(self.rows["teacher_spans"], self.rows.teacher_has_loss)
        return mapped.to(self.tokens.device)


def micro_batch(rows: Rows, number: int, device: torch.device, *, origin: Origin) -> MicroBatch:
    """Return rows as a micro-batch on the device."""
    moved = rows.to(device, non_blocking=True)
    seq_length = rows["input_ids"].shape[1]
    return MicroBatch(
        number=number,
        tokens=moved["input_ids"].long(),
        labels=moved["labels"].long(),
        loss_mask=moved["loss_mask"],
        position_ids=moved["position_ids"].long(),
        segments=row_segments(rows["cu_seqlens"], seq_length, device),
        rows=rows,
        origin=origin,
    )


def teacher_rows(batches: list[MicroBatch]) -> TeacherRows:
    """Return the teacher's side of some micro-batches, one after the other."""
    return TeacherRows(
        torch.cat([batch.rows["teacher_input_ids"] for batch in batches]),
        torch.cat([batch.rows["teacher_cu_seqlens"] for batch in batches]),
    )


def spread_scores(
    batches: list[MicroBatch], losses: Tensor, how: Aggregation, times: ServiceTimes
) -> list[MicroBatch]:
    """Return micro-batches guided by the losses of all their rows.

    Args:
        batches: in the order in which `teacher_rows` took them.
        losses: fp32 [rows of all, teacher_seq_length].
        how: Φ.
        times: of all together; each micro-batch gets its share.
    """
    count = len(batches)
    share = ServiceTimes(
        times.waited_seconds / count, times.num_tokens / count, times.seconds / count
    )
    parts = losses.split([len(batch.tokens) for batch in batches])
    return [batch.guided_by(part, how, share) for batch, part in zip(batches, parts, strict=True)]


class GuidedBatches(Iterator[MicroBatch]):
    """Micro-batches of the last pipeline stage, each with its guidance from another world.

    A step's micro-batches make one request. `lookahead` further steps are on their way while one is
    computed: the teacher scores step n + 1 while the student computes step n.
    """

    def __init__(
        self,
        batches: Iterator[MicroBatch],
        bridge: StudentBridge | None,
        *,
        num_microbatches: int,
        how: Aggregation,
        tensor_parallel_group: dist.ProcessGroup,
        lookahead: int,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """Start without asking anything.

        Args:
            batches: to guide.
            bridge: of the first tensor-parallel rank, which passes replies on; None on the others.
            num_microbatches: of a step.
            how: Φ.
            tensor_parallel_group: ranks that compute the same loss.
            lookahead: steps requested beyond the one that is computed.
            meet: returns when all of the student's ranks are here.
        """
        self._batches = batches
        self._bridge = bridge
        self._num_microbatches = num_microbatches
        self._how = how
        self._group = tensor_parallel_group
        self._lookahead = lookahead
        self._meet = meet
        self._asked: deque[tuple[list[MicroBatch], PendingScores | None]] = deque()
        self._ready: deque[MicroBatch] = deque()

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch; wait for the teacher at the start of a step.

        Raises:
            StopIteration: the run's samples are used up.
            BridgeError: the teacher is gone.
        """
        if not self._ready:
            self._ask(1)
            if not self._asked:
                raise StopIteration
            step, pending = self._asked.popleft()
            losses, times = self._receive(step, pending)
            # Before this step is computed, so that the teacher has work while it is.
            self._ask(self._lookahead)
            self._ready.extend(spread_scores(step, losses, self._how, times))
        return self._ready.popleft()

    def drain(self) -> None:
        """Take the replies that are still on their way, so that the bridge can be closed."""
        while self._asked:
            _, pending = self._asked.popleft()
            if pending is not None:
                pending.wait()

    def _ask(self, num_steps: int) -> None:
        while len(self._asked) < num_steps:
            step = list(islice(self._batches, self._num_microbatches))
            if not step:
                return
            pending = None if self._bridge is None else self._bridge.request(teacher_rows(step))
            self._asked.append((step, pending))

    def _receive(
        self, step: list[MicroBatch], pending: PendingScores | None
    ) -> tuple[Tensor, ServiceTimes]:
        num_rows = sum(len(batch.tokens) for batch in step)
        places = step[0].rows["teacher_input_ids"].shape[1]
        device = step[0].tokens.device
        if pending is None:
            message = torch.empty(num_rows * places + 3, device=device)
        else:
            start = time.perf_counter()
            scores = pending.wait()
            message = _flatten(scores, time.perf_counter() - start).to(device)
        # Before the broadcast, whose timeout is Megatron's.
        self._meet()
        if self._group.size() > 1:
            dist.broadcast(message, dist.get_global_rank(self._group, 0), group=self._group)
        return message[:-3].view(num_rows, places), ServiceTimes(*message[-3:].tolist())


def _flatten(scores: Scores, waited_seconds: float) -> Tensor:
    trailer = torch.tensor([waited_seconds, scores.num_tokens, scores.seconds])
    return torch.cat((scores.losses.flatten(), trailer))
