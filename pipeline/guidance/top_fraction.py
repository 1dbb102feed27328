"""The exact top fraction of a ranking, in one process or over the ranks of a process group.

A radix search finds the k-th largest value by three histograms of 2,048 digits, summed over the
ranks: nothing is sorted, and the host never waits. Ties at the threshold go to the first tokens,
row by row and rank by rank, so the result doesn't depend on how ranks share them.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.fractions import floor_of_fraction

_DIGIT_BITS = 11
_RANKING_BITS = 33  # an fp32 value takes 32; a whole number of digits


def keep_top_fraction(
    ranking: Tensor,
    candidates: Tensor,
    fraction: float,
    *,
    per_row: bool = False,
    group: dist.ProcessGroup | None = None,
    num_candidates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keep the highest-ranking `floor_of_fraction` of the candidates.

    The ranking is fp32 [rows, T], finite for candidates. They compete within each row, or over all
    rows of all ranks in the group, which must all call; `num_candidates`, int64 [rows or 1], counts
    them.

    Returns which are kept, and the smallest kept values, fp32 [rows or 1], NaN if none is.
    """
    shape = ranking.shape
    rows = shape if per_row else (1, ranking.numel())
    members = candidates.reshape(rows)
    keys = _descending_keys(ranking.reshape(rows))
    num_kept = floor_of_fraction(num_candidates, fraction)

    last, num_tied = _kth_smallest(keys, members, num_kept, group)
    kept = members & (keys < last.unsqueeze(-1)) & (num_kept > 0).unsqueeze(-1)
    tied = members & (keys == last.unsqueeze(-1))
    # The first `num_tied` of them, counted from the first rank on.
    numbers = tied.cumsum(-1) + _sum_before(tied.sum(-1), group).unsqueeze(-1)
    tied &= numbers <= num_tied.unsqueeze(-1)
    threshold = _ranking_of_keys(last).masked_fill(num_kept == 0, torch.nan)
    return (kept | tied).view(shape), threshold


def _kth_smallest(
    keys: Tensor, members: Tensor, k: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Find each group's k-th smallest key, and the number of equal keys among the k."""
    prefix, remaining = torch.zeros_like(k), k.clone()
    for shift in range(_RANKING_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        alive = members & ((keys >> (shift + _DIGIT_BITS)) == prefix.unsqueeze(-1))
        digits = (keys >> shift) & (2**_DIGIT_BITS - 1)
        counts = k.new_zeros(k.numel(), 2**_DIGIT_BITS).scatter_add_(1, digits, alive.long())
        if group is not None:
            dist.all_reduce(counts, group=group)
        running = counts.cumsum(-1)
        digit = (running < remaining.unsqueeze(-1)).sum(-1)
        below = torch.where(
            digit > 0, running.gather(1, (digit - 1).clamp_min(0)[:, None])[:, 0], 0
        )
        prefix, remaining = (prefix << _DIGIT_BITS) | digit, remaining - below
    return prefix, remaining


def _descending_keys(ranking: Tensor) -> Tensor:
    """Map fp32 to integers in 0..2**32 - 1, in reverse order."""
    bits = (ranking + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0, which ties with it
    ascending = torch.where(bits < 0, ~bits, bits + 2**31)
    return 2**32 - 1 - ascending


def _ranking_of_keys(keys: Tensor) -> Tensor:
    ascending = 2**32 - 1 - keys
    bits = torch.where(ascending < 2**31, ~ascending, ascending - 2**31)
    return bits.to(torch.int32).view(torch.float32)


def _sum_before(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return torch.zeros_like(own)
    ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(ranks, own, group=group)
    return torch.stack(ranks)[: group.rank()].sum(0)
