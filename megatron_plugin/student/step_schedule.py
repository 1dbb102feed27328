"""A step's micro-batches are read before its schedule starts.

Megatron reads each micro-batch when its forward pass starts, which on later pipeline stages is
after the first stage has computed. Where a step needs a teacher, all ranks have to stop before it:
those that wait for losses, and those that would wait for them in Megatron's own collectives.
Megatron has no hook there, so `megatron.training.training.get_forward_backward_func` is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_plugin.student.batch import MicroBatch
from megatron_plugin.upstream import training

Schedule = Callable[..., Any]
Guide = Callable[[list[MicroBatch]], list[MicroBatch]]
Batches = Iterator[MicroBatch]


def read_steps_ahead(guide: Guide = lambda batches: batches) -> None:
    """Wrap the schedules of training and validation.

    Args:
        guide: what a step's micro-batches, read on this rank, are turned into.
    """
    original = training.get_forward_backward_func

    def wrapped(*given: Any, **named: Any) -> Schedule:
        return _reading_ahead(original(*given, **named), guide)

    training.get_forward_backward_func = wrapped


def _reading_ahead(schedule: Schedule, guide: Guide) -> Schedule:
    def run(*, data_iterator: Batches | list[Batches], num_microbatches: int, **others: Any) -> Any:
        def read(iterator: Batches) -> Batches:
            return iter(guide([next(iterator) for _ in range(num_microbatches)]))

        ahead: Batches | list[Batches]
        if isinstance(data_iterator, list):  # this rank has several chunks of the model
            ahead = [read(each) for each in data_iterator]
        else:
            ahead = read(data_iterator)
        return schedule(data_iterator=ahead, num_microbatches=num_microbatches, **others)

    return run
