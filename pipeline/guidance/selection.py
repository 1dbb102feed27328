"""Selection of student tokens: by the teacher, and by control methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.guidance.top_fraction import keep_top_fraction
from pipeline.losses.loss_checks import check_finite, check_same_shape, count_broken, refuse_broken
from pipeline.selection_rule import PAPER_RULE, RANKED_BY_ENTROPY, RANKED_BY_TEACHER, SelectionRule

_FIXED_POINT = 2.0**24
# Above what any scores store; four million tokens' sum stays within int64.
_LARGEST_LOSS = 2.0**17


@dataclass(frozen=True)
class Selection:
    """The chosen tokens, and the values that decided.

    Attributes:
        kept: bool [rows, seq_length].
        mapped: bool [rows, seq_length], tokens of the loss mask that a teacher token with a loss
            covers; all of them without a teacher.
        loss_mask: bool [rows, seq_length].
        guidance: fp32 [rows, seq_length], nats, NaN = unmapped; None without a teacher's losses.
        threshold: fp32 [rows] for scope `row`, else [1]: the lowest ranking that won a place; NaN
            if none did.
    """

    kept: Tensor
    mapped: Tensor
    loss_mask: Tensor
    guidance: Tensor | None
    threshold: Tensor


@torch.no_grad()
def select_tokens(
    student_losses: Tensor,
    guidance: Tensor | None,
    *,
    loss_mask: Tensor,
    rule: SelectionRule = PAPER_RULE,
    group: dist.ProcessGroup | None = None,
    teacher_losses: Tensor | None = None,
    mapped: Tensor | None = None,
    entropies: Tensor | None = None,
    step: int = 0,
) -> Selection:
    """Choose the student tokens whose loss counts, from detached values.

    With scope `group` all its ranks must call; they choose as one process with all rows would. Ties
    at the threshold go to the smaller position.

    Args:
        student_losses: float [rows, seq_length], nats.
        guidance: float [rows, seq_length], the teacher's loss for each label, NaN = unmapped. None:
            no teacher's losses (not for selectors `teacher` and `teacher_loss`).
        loss_mask: bool or float [rows, seq_length], 0 for labels that never count.
        rule: selector, share, strategy for unmapped tokens, scope.
        group: the ranks that choose together; scope `group` only.
        teacher_losses: float [rows, teacher_seq_length], nats, of the teacher's own tokens, NaN
            without a loss; each token on one rank of the group. Only for `mean` with a selector
            that ranks by the teacher.
        mapped: bool [rows, seq_length] of `mapped_tokens`, in place of guidance. Without either all
            are mapped.
        entropies: float [rows, seq_length], nats, of the model that selector `student_entropy` or
            `teacher_entropy` names.
        step: of training; selector `random` differs between steps.

    Raises:
        NonFiniteLossError: NaN or infinite losses where the mask counts; on every rank of a group.
        ValueError: shapes disagree, or arguments don't fit each other or the rule.

    Example:
        >>> select_tokens(student_losses, guidance, loss_mask=loss_mask).kept.sum()

    Source: VocAgnoLM (arXiv 2503.19123), Eq. 4 and section 6.2.
    """
    values = _Values(student_losses, guidance, mapped, entropies, teacher_losses)
    _check_selection_inputs(values, loss_mask, rule, group)
    values, mask = values.detached(), loss_mask.bool()
    known = mask if values.mapped is None else mask & values.mapped
    if rule.selector == "full":
        check_finite(_that_count(values, mask, known, rule), group)
        nothing_competed = values.student_losses.new_full((1,), torch.nan)
        return Selection(mask, known, mask, values.guidance, nothing_competed)
    kept, threshold = _keep_top(values, mask, known, rule, group=group, step=step)
    if rule.unmapped == "include":
        kept |= mask & ~known
    return Selection(kept, known, mask, values.guidance, threshold)


def _keep_top(
    values: _Values,
    mask: Tensor,
    known: Tensor,
    rule: SelectionRule,
    *,
    group: dist.ProcessGroup | None,
    step: int,
) -> tuple[Tensor, Tensor]:
    counted = _that_count(values, mask, known, rule)
    candidates = mask if rule.unmapped == "mean" else known
    totals = sum_totals(
        count_broken(counted),
        candidates,
        values.teacher_losses if _needs_teacher_losses(rule) else None,
        per_row=rule.scope == "row",
        group=group,
    )
    refuse_broken(counted, totals.num_broken)
    # Numbered row by row, and rank by rank: as one process holding all of the rows would.
    positions = torch.arange(mask.numel(), device=mask.device).view(mask.shape) + totals.num_before
    return keep_top_fraction(
        _ranking(values, known, rule, totals, step, positions),
        candidates,
        rule.keep_fraction,
        per_row=rule.scope == "row",
        group=group,
        num_candidates=totals.num_candidates,
    )


@dataclass(frozen=True)
class _Values:
    """The arguments of `select_tokens` that tokens are ranked by."""

    student_losses: Tensor
    guidance: Tensor | None
    mapped: Tensor | None
    entropies: Tensor | None
    teacher_losses: Tensor | None

    def detached(self) -> _Values:
        guidance = _detach(self.guidance)
        mapped = self.mapped if guidance is None else ~guidance.isnan()
        return _Values(
            self.student_losses.detach().float(),
            guidance,
            None if mapped is None else mapped.bool(),
            _detach(self.entropies),
            _detach(self.teacher_losses),
        )


def _detach(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().float()


def _needs_teacher_losses(rule: SelectionRule) -> bool:
    return rule.unmapped == "mean" and rule.selector in RANKED_BY_TEACHER


def _that_count(
    values: _Values, mask: Tensor, known: Tensor, rule: SelectionRule
) -> dict[str, tuple[Tensor, Tensor]]:
    counted = {"student_losses": (values.student_losses, mask)}
    if values.guidance is not None:
        counted["guidance"] = (values.guidance, known)
    if values.entropies is not None:
        counted["entropies"] = (values.entropies, mask)
    if values.teacher_losses is not None and _needs_teacher_losses(rule):
        counted["teacher_losses"] = (values.teacher_losses, ~values.teacher_losses.isnan())
    return counted


def _ranking(
    values: _Values,
    mapped: Tensor,
    rule: SelectionRule,
    totals: Totals,
    step: int,
    positions: Tensor,
) -> Tensor:
    if rule.selector == "random":
        return _hash(positions, rule.seed, step)
    if rule.selector in RANKED_BY_ENTROPY:
        assert values.entropies is not None
        return values.entropies
    if rule.selector == "student_loss":
        return values.student_losses
    guidance = values.guidance
    assert guidance is not None
    if _needs_teacher_losses(rule):
        guidance = torch.where(mapped, guidance, totals.mean_teacher_loss)
    return -guidance if rule.selector == "teacher_loss" else values.student_losses - guidance


def _hash(positions: Tensor, seed: int, step: int) -> Tensor:
    """Map positions to fp32 in 0..1, the same on every device and for every sharding.

    The finaliser of SplitMix64 (Steele et al., 2014), for which int64 products wrap.
    """
    state = positions
    for salt in (seed, step):
        state = state + _signed(0x9E3779B97F4A7C15 * (salt + 1))
        state = (state ^ _shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
        state = (state ^ _shift(state, 27)) * _signed(0x94D049BB133111EB)
        state = state ^ _shift(state, 31)
    return _shift(state, 40).float() / 2**24


def _shift(state: Tensor, bits: int) -> Tensor:
    mask: int = 2 ** (64 - bits) - 1
    return (state >> bits) & mask


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _check_selection_inputs(
    values: _Values, loss_mask: Tensor, rule: SelectionRule, group: dist.ProcessGroup | None
) -> None:
    losses = values.student_losses
    if losses.dim() != 2:
        raise ValueError(f"student_losses must be [rows, seq_length], got {tuple(losses.shape)}")
    check_same_shape(
        losses,
        loss_mask=loss_mask,
        guidance=values.guidance,
        mapped=values.mapped,
        entropies=values.entropies,
    )
    if values.mapped is not None and values.guidance is not None:
        raise ValueError(
            "mapped and guidance are given: guidance says by NaN what is unmapped; give one of them"
        )
    if rule.selector in RANKED_BY_TEACHER and values.guidance is None:
        raise ValueError(
            f"selector {rule.selector!r} needs guidance; aggregate_teacher_losses makes it"
        )
    if rule.selector in RANKED_BY_ENTROPY and values.entropies is None:
        raise ValueError(
            f"selector {rule.selector!r} needs entropies; linear_cross_entropy gives them "
            "with with_entropy=True"
        )
    if _needs_teacher_losses(rule) and values.teacher_losses is None:
        raise ValueError(
            "unmapped 'mean' needs teacher_losses, the losses of the teacher's own tokens: it "
            "averages all of them, and guidance holds only what mapped tokens took"
        )
    if (rule.scope == "group") != (group is not None):
        raise ValueError(
            f"scope {rule.scope!r} {'needs' if group is None else 'does not take'} a process "
            "group: pass one with scope 'group' and with no other"
        )


@dataclass(frozen=True)
class Totals:
    """Counts and sums over a scope: each row, this process, or all ranks of a group.

    `num_broken` counts non-finite values on all ranks, `num_before` tokens on earlier ranks.
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
    per_row: bool,
    group: dist.ProcessGroup | None,
) -> Totals:
    """Add up a scope's totals, in one collective that all ranks of a group must call."""
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

    Fixed-point sums don't depend on the order, so one process and many ranks select alike.
    """
    if losses is None:
        nothing = candidates.new_zeros(len(candidates), dtype=torch.int64)
        return nothing, nothing
    # Infinite ones are counted as broken, and no mean is taken.
    has_loss = losses.isfinite()
    counted = torch.where(has_loss, losses, 0.0).double().clamp_max(_LARGEST_LOSS)
    fixed = (counted * _FIXED_POINT).round().long()
    return fixed.sum(-1), has_loss.sum(-1)
