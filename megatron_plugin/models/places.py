"""The places of each row that a context-parallel rank holds.

As in Megatron, a row has 2 * ranks stretches; rank r has numbers r and 2 * ranks - 1 - r, because
later places attend to more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_plugin.upstream import gather_from_sequence_parallel_region, parallel_state


@dataclass(frozen=True)
class RowShare:
    """A rank's part of every row, among `size` ranks that share rows."""

    rank: int = 0
    size: int = 1

    def stretches(self, seq_length: int) -> tuple[tuple[int, int], ...]:
        """Return the rank's half-open ranges of a row's places, ascending."""
        if self.size == 1:
            return ((0, seq_length),)
        length, rest = divmod(seq_length, 2 * self.size)
        assert not rest, f"{seq_length} places can't be cut into {2 * self.size} stretches"
        numbers = (self.rank, 2 * self.size - 1 - self.rank)
        return tuple((number * length, (number + 1) * length) for number in numbers)

    def take(self, rows: Tensor) -> Tensor:
        """Return the rank's places, [rows, seq_length / size, …], of [rows, seq_length, …]."""
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
    """Join all ranks' parts to whole rows, places first."""
    if group.size() == 1:
        return own
    gathered = gather_from_sequence_parallel_region(own.contiguous(), group=group)
    stretches = gathered.chunk(2 * group.size())
    return torch.cat([*stretches[::2], *reversed(stretches[1::2])])
