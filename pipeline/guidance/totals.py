"""What ranks must know of each other's tokens before they choose together, in one message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_FIXED_POINT = 2.0**24


@dataclass(frozen=True)
class Totals:
    """Counts and sums over a scope: each row, this process, or all ranks of a group.

    Attributes:
        num_broken: int64 scalar, NaN or infinite values that count, on all ranks.
        num_before: int64 scalar, tokens on the ranks before this one.
        num_candidates: int64 [rows or 1], tokens that compete.
        mean_teacher_loss: fp32 [rows or 1, 1], nats; 0 if there is no loss.
    """

    num_broken: Tensor
    num_before: Tensor
    num_candidates: Tensor
    mean_teacher_loss: Tensor


def sum_totals(
    num_broken: Tensor,
    candidates: Tensor,
    teacher_losses: Tensor | None,
    *,
    per_row: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Totals:
    """Add up what a choice needs of the whole scope, in one collective.

    Args:
        num_broken: int64 scalar, of this rank.
        candidates: bool [rows, T], the tokens that compete.
        teacher_losses: fp32 [rows, teacher_seq_length], nats, to average; NaN: none. None: there is
            nothing to average.
        per_row: whether each row is a scope of its own.
        group: whose ranks share the scope, not with `per_row`; every rank must call.

    Example:
        >>> sum_totals(torch.tensor(0), torch.tensor([[True, False]]), None).num_candidates
        tensor([1])
    """
    rows = torch.stack((candidates.sum(-1), *_fixed_point_sums(candidates, teacher_losses)))
    counted = rows if per_row else rows.sum(-1, keepdim=True)
    num_before = num_broken.new_zeros(())
    if group is not None:
        num_tokens = torch.full_like(num_broken.view(1), candidates.numel())
        own = torch.cat((num_broken.view(1), num_tokens, counted[:, 0]))
        ranks = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(ranks, own, group=group)
        gathered = torch.stack(ranks)
        num_before = gathered[: group.rank(), 1].sum()
        num_broken, counted = gathered[:, 0].sum(), gathered[:, 2:].sum(0).unsqueeze(-1)
    # Without any loss the mean is 0: no token is mapped then, and any other constant would rank
    # them alike.
    mean = (counted[1].double() / _FIXED_POINT / counted[2].clamp_min(1)).float().unsqueeze(-1)
    return Totals(num_broken, num_before, counted[0], mean)


def _fixed_point_sums(candidates: Tensor, losses: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each row's sum of losses and their number, int64 [rows].

    Fixed-point integers add up to the same sum in any order, so one process and many ranks get the
    same mean to the last bit, and hence the same selection.
    """
    if losses is None:
        nothing = candidates.new_zeros(len(candidates), dtype=torch.int64)
        return nothing, nothing
    # Infinite ones are counted as broken, and no mean is taken.
    has_loss = losses.isfinite()
    fixed = (torch.where(has_loss, losses, 0.0).double() * _FIXED_POINT).round().long()
    return fixed.sum(-1), has_loss.sum(-1)
