"""The places of each row that a context-parallel rank holds.

Megatron cuts a row into twice as many stretches as there are ranks, and gives rank r the stretches
r and 2 * ranks - 1 - r: later places attend to more, so this balances the work. Its rotary
embeddings are cut that way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_plugin.upstream import gather_from_sequence_parallel_region, parallel_state


@dataclass(frozen=True)
class RowShare:
    """A rank's part of every row, among `size` ranks that share rows; 1: each has whole rows."""

    rank: int = 0
    size: int = 1

    def stretches(self, seq_length: int) -> tuple[tuple[int, int], ...]:
        """Return the half-open ranges of the rank's places in a row, ascending.

        Example:
            >>> RowShare(rank=1, size=2).stretches(8)
            ((2, 4), (4, 6))
        """
        if self.size == 1:
            return ((0, seq_length),)
        length, rest = divmod(seq_length, 2 * self.size)
        assert not rest, f"{seq_length} places can't be cut into {2 * self.size} stretches"
        numbers = (self.rank, 2 * self.size - 1 - self.rank)
        return tuple((number * length, (number + 1) * length) for number in numbers)

    def take(self, rows: Tensor) -> Tensor:
        """Return the rank's places of rows, [rows, seq_length / size, …], of [rows, seq_length, …].

        Example:
            >>> RowShare(rank=0, size=2).take(torch.arange(8).view(1, 8))
            tensor([[0, 1, 6, 7]])
        """
        if self.size == 1:
            return rows
        return torch.cat([rows[:, slice(*own)] for own in self.stretches(rows.shape[1])], 1)


WHOLE_ROWS = RowShare()


def own_share() -> RowShare:
    """Return this rank's part of the rows."""
    return RowShare(
        parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    )


def gather_places(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join all ranks' parts to whole rows, places first; gradients go back to their ranks."""
    if group.size() == 1:
        return own
    gathered = gather_from_sequence_parallel_region(own.contiguous(), group=group)
    stretches = gathered.chunk(2 * group.size())
    return torch.cat([*stretches[::2], *reversed(stretches[1::2])])
