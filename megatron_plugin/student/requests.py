"""Request losses from another world, steps ahead of their use."""

import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_plugin.arguments import TeacherOptions
from megatron_plugin.bridge import START_TIMEOUT, Pairing, StudentBridge, TeacherAnswer
from megatron_plugin.models.copies import to_device
from megatron_plugin.student.guide import Guide
from megatron_plugin.student.micro_batch import MicroBatch, teacher_rows
from megatron_plugin.upstream import parallel_state

# Of Megatron's timeouts, so the leader, which knows the cause, ends before waiting ranks.
_PATIENCE = 0.8

# A step's micro-batches and, with the bridge, a function that waits for the reply.
_Asked = tuple[list[MicroBatch], Callable[[], TeacherAnswer] | None]


def connect(
    teacher: TeacherOptions, args: Namespace, store: dist.Store, *, width: int
) -> StudentBridge | None:
    """Connect the leaders with the teacher's world; all ranks call, and wait until they are.

    Only a replica's leader gets a bridge, for answers with `width` next tokens per place.
    """
    replicas, bridge = range(args.data_parallel_size), None
    is_last = parallel_state.is_pipeline_last_stage()
    if is_last and parallel_state.get_tensor_and_context_parallel_rank() == 0:
        replica = parallel_state.get_data_parallel_rank()
        later = args.distributed_timeout_seconds_after_init  # which Megatron sets after a step
        bridge = StudentBridge(
            store,
            Pairing(len(replicas), teacher.num_replicas),
            replica=replica,
            timeout=timedelta(minutes=_PATIENCE * args.distributed_timeout_minutes),
            later_timeout=None if later is None else timedelta(seconds=_PATIENCE * later),
            width=width,
        )
        store.set(f"connected/{replica}", "")
    # The leaders wait START_TIMEOUT for the teacher's, and report the failure.
    store.wait([f"connected/{replica}" for replica in replicas], 2 * START_TIMEOUT)
    return bridge


@dataclass(eq=False)
class GuidedBatches(Iterator[MicroBatch]):
    """The last pipeline stage's micro-batches, with guidance from another world.

    One request per step, `lookahead` steps ahead, so the teacher scores while the student computes.
    The first of `group`, the ranks that share these rows, has the bridge and passes replies on.
    """

    batches: Iterator[MicroBatch]
    bridge: StudentBridge | None
    num_microbatches: int
    guide: Guide
    group: dist.ProcessGroup
    lookahead: int
    _asked: deque[_Asked] = field(init=False, default_factory=deque)
    _ready: deque[MicroBatch] = field(init=False, default_factory=deque)

    def __next__(self) -> MicroBatch:
        if not self._ready:
            self._ask(1)
            if not self._asked:
                raise StopIteration
            step, pending = self._asked.popleft()
            start = time.perf_counter()
            values = self._receive(step, pending)
            waited = time.perf_counter() - start
            # Before this step is computed, so the teacher works meanwhile.
            self._ask(self.lookahead)
            self._ready.extend(self.guide.by_teacher(step, values, waited_seconds=waited))
        return self._ready.popleft()

    def drain(self) -> None:
        """Take outstanding replies, to close the bridge."""
        while self._asked:
            _, pending = self._asked.popleft()
            if pending is not None:
                pending()

    def _ask(self, num_steps: int) -> None:
        while len(self._asked) < num_steps:
            step = list(islice(self.batches, self.num_microbatches))
            if not step:
                return
            pending = None if self.bridge is None else self.bridge.request(teacher_rows(step))
            self._asked.append((step, pending))

    def _receive(
        self, step: list[MicroBatch], pending: Callable[[], TeacherAnswer] | None
    ) -> Tensor:
        device = step[0].tokens.device
        if pending is None:
            num_rows = sum(len(batch.tokens) for batch in step)
            values = torch.empty(num_rows, self.guide.num_values(step[0]), device=device)
        else:
            values = to_device(self.guide.read_answer(step, pending()), device)
        if self.group.size() > 1:
            dist.broadcast(values, dist.get_global_rank(self.group, 0), group=self.group)
        return values
