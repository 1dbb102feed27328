"""How a step's micro-batches are read, in two places where Megatron's trainer has no hook.

Megatron reads each micro-batch when its forward pass starts, which on later pipeline stages is
after the first stage has computed. Where a step needs a teacher, all ranks have to stop before it:
those that wait for losses, and those that would wait for them in Megatron's own collectives. So
`training.get_forward_backward_func` is wrapped.

Steps of `--iterations-to-skip` are read as dictionaries of tensors on the first tensor-parallel
rank. Ours are no dictionaries, and every rank reads its own: `training.dummy_train_step` is
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_plugin.student.batch import MicroBatch
from megatron_plugin.upstream import get_num_microbatches, get_rerun_state_machine, training

Schedule = Callable[..., Any]
Batches = Iterator[MicroBatch]


def read_steps_ahead(
    guide: Callable[[list[MicroBatch]], list[MicroBatch]] = lambda batches: batches,
) -> None:
    """Wrap the schedules of training and validation.

    Args:
        guide: what a step's micro-batches, read on this rank, are turned into.
    """
    original = training.get_forward_backward_func

    def wrapped(*given: Any, **named: Any) -> Schedule:
        schedule = original(*given, **named)

        def run(
            *, data_iterator: Batches | list[Batches], num_microbatches: int, **others: Any
        ) -> Any:
            def read(iterator: Batches) -> Batches:
                return iter(guide([next(iterator) for _ in range(num_microbatches)]))

            if isinstance(data_iterator, list):  # this rank has several chunks of the model
                ahead: Batches | list[Batches] = [read(each) for each in data_iterator]
            else:
                ahead = read(data_iterator)
            return schedule(data_iterator=ahead, num_microbatches=num_microbatches, **others)

        return run

    training.get_forward_backward_func = wrapped


def take_over_skipping() -> None:
    """Let Megatron's trainer read the steps that it skips by `_skip_step`."""
    training.dummy_train_step = _skip_step


def _skip_step(data_iterator: Batches | list[Batches]) -> None:
    """Read a step's micro-batches, of each model chunk where there are several."""
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    reruns = get_rerun_state_machine()
    while reruns.should_run_forward_backward(data_iterator):
        for iterator in iterators:
            for _ in range(get_num_microbatches()):
                next(iterator)
