"""Ranks that are threads: process groups without processes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.distributed as dist

NUM_RANKS = 4


class Group:
    """A rank's view of a process group whose ranks are threads; it counts its messages."""

    def __init__(self, rank, barrier, held):
        self.rank, self.size = lambda: rank, lambda: NUM_RANKS
        self.barrier, self.held, self.num_messages = barrier, held, 0

    def exchange(self, tensor):
        self.num_messages += 1
        self.held[self.rank()] = tensor.clone()
        self.barrier.wait()
        everyones = list(self.held)
        self.barrier.wait()
        return everyones


@pytest.fixture
def run_ranks(monkeypatch):
    """A function that gives each rank its group, at once, and returns what each rank makes."""

    def reduce(tensor, op=dist.ReduceOp.SUM, *, group):
        everyones = torch.stack(group.exchange(tensor))
        tensor.copy_(everyones.amax(0) if op == dist.ReduceOp.MAX else everyones.sum(0))

    collect = lambda into, own, group: torch._foreach_copy_(into, group.exchange(own))  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "all_gather", collect)

    def run(rank_of):
        barrier, held = Barrier(NUM_RANKS, timeout=60), [None] * NUM_RANKS
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            groups = [Group(rank, barrier, held) for rank in range(NUM_RANKS)]
            return list(pool.map(rank_of, groups))

    return run
