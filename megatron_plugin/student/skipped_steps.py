"""Steps of `--iterations-to-skip`: their rows are read and not learned from.

Megatron's own way reads each micro-batch as a dictionary of tensors on the first tensor-parallel
rank; ours are no dictionaries, and every rank reads its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_plugin.upstream import get_num_microbatches, get_rerun_state_machine, training

BatchIterator = Iterator[Any]


def take_over_skipping() -> None:
    """Let Megatron's trainer skip steps by `skip_step`."""
    training.dummy_train_step = skip_step


def skip_step(data_iterator: BatchIterator | list[BatchIterator]) -> None:
    """Read a step's micro-batches, of each model chunk where there are several."""
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    reruns = get_rerun_state_machine()
    while reruns.should_run_forward_backward(data_iterator):
        for iterator in iterators:
            for _ in range(get_num_microbatches()):
                next(iterator)
