"""Choose the student tokens whose loss counts: by the teacher, and as would falsify it.

Every selector ranks the tokens that compete; the fraction kept, the treatment of unmapped tokens
and the scope are common, so two selectors differ in nothing but the ranking.

Source: VocAgnoLM (arXiv 2503.19123), Eq. 4 and section 6.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.loss_checks import check_choice, check_finite, check_same_shape
from pipeline.top_fraction import global_positions, keep_top_fraction

Selector = Literal["teacher", "full", "random", "student_loss", "student_entropy"]
UnmappedStrategy = Literal["include", "exclude", "mean"]
Scope = Literal["row", "microbatch", "group"]

_FIXED_POINT = 2.0**24


@dataclass(frozen=True)
class SelectionRule:
    """How tokens are chosen; the defaults are the paper's.

    Attributes:
        selector: what the competing tokens are ranked by, highest first. `teacher`: student loss
            minus teacher loss (Eq. 4). `student_loss`, `student_entropy`: these alone. `random`: a
            hash of seed, step and position. `full`: every token is kept (plain continual
            pretraining).
        keep_fraction: share of the competing tokens to keep; floor(keep_fraction * competing).
        unmapped: what happens to tokens without guidance (section 6.2). `include`: all are kept
            beside the top fraction of the mapped tokens. `exclude`: none is kept. `mean`: each
            takes the mean guidance of the scope's mapped tokens as its own and competes with them.
            The strategy holds for every selector but `full`, so selectors differ in nothing but the
            ranking.
        scope: where the top fraction is counted: within each `row`, the `microbatch` of this
            process, or over all ranks of a process `group` (data- and context-parallel).
        seed: of the `random` selector.
    """

    selector: Selector = "teacher"
    keep_fraction: float = 0.4
    unmapped: UnmappedStrategy = "include"
    scope: Scope = "microbatch"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        check_choice("selector", self.selector, Selector)
        check_choice("unmapped", self.unmapped, UnmappedStrategy)
        check_choice("scope", self.scope, Scope)
        if not 0.0 <= self.keep_fraction <= 1.0:
            raise ValueError(
                f"keep_fraction must lie in 0..1, got {self.keep_fraction}: 40 % is written 0.4"
            )


PAPER_RULE = SelectionRule()


@dataclass(frozen=True)
class Selection:
    """The tokens that count, and what was known when they were chosen.

    Attributes:
        kept: bool [rows, seq_length].
        mapped: bool [rows, seq_length], tokens of the loss mask that have guidance (all of them
            when there is no guidance at all).
        loss_mask: bool [rows, seq_length].
        guidance: fp32 [rows, seq_length], nats, NaN = unmapped; None without a teacher.
        threshold: fp32 [rows] for scope `row`, else [1]: the smallest score among the kept tokens
            that competed; NaN where none was kept or nothing competed.
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
    student_entropies: Tensor | None = None,
    step: int = 0,
    positions: Tensor | None = None,
) -> Selection:
    """Choose the student tokens whose loss counts, from detached values.

    With scope `group` every rank of the group must call; the choice is exact, and the same as one
    process holding all rows would make. Ties at the threshold go to the smaller position.

    Args:
        student_losses: float [rows, seq_length], nats.
        guidance: float [rows, seq_length], the teacher's loss for each label, NaN = unmapped. None:
            no teacher, every token competes (not for selector `teacher`).
        loss_mask: bool or float [rows, seq_length], 0 for labels that never count.
        rule: selector, fraction, strategy for unmapped tokens, scope.
        group: the data- and context-parallel ranks that share the choice; scope `group` only.
        student_entropies: float [rows, seq_length], nats; selector `student_entropy` only.
        step: of training; selector `random` draws anew for each.
        positions: int64 [rows, seq_length], unique and below 2**55 over the scope: numbers the
            tokens independently of how ranks share them. Needed under context parallelism, where
            ranks don't hold consecutive rows. None: rank order, then row order.

    Returns:
        The selection.

    Raises:
        NonFiniteLossError: NaN or infinite losses where the mask counts; names the row. In a group,
            every rank raises.
        ValueError: shapes disagree or the rule needs an argument that is missing.

    Example:
        >>> select_tokens(student_losses, guidance, loss_mask=loss_mask).kept.sum()

    Source: Eq. 4 and section 6.2.
    """
    _check_selection_inputs(student_losses, guidance, loss_mask, rule, group, student_entropies)
    mask = loss_mask.bool()
    losses = student_losses.detach().float()
    mapped = mask
    values = {"student_losses": (losses, mask)}
    if guidance is not None:
        guidance = guidance.detach().float()
        mapped = mask & ~guidance.isnan()
        values["guidance"] = (guidance, mapped)
    if student_entropies is not None:
        student_entropies = student_entropies.detach().float()
        values["student_entropies"] = (student_entropies, mask)
    check_finite(values, group)
    if rule.selector == "full":
        nothing_competed = losses.new_full((1,), torch.nan)
        return Selection(mask, mapped, mask, guidance, nothing_competed)
    if positions is None:
        positions = global_positions(losses.shape, losses.device, group)
    scores = _scores(losses, guidance, mapped, rule, group, student_entropies, step, positions)
    competing = mask if rule.unmapped == "mean" else mapped
    top = keep_top_fraction(
        scores,
        competing,
        rule.keep_fraction,
        positions=positions,
        per_row=rule.scope == "row",
        group=group,
    )
    kept = top.kept | (mask & ~mapped) if rule.unmapped == "include" else top.kept
    return Selection(kept, mapped, mask, guidance, top.threshold)


def _scores(
    losses: Tensor,
    guidance: Tensor | None,
    mapped: Tensor,
    rule: SelectionRule,
    group: dist.ProcessGroup | None,
    entropies: Tensor | None,
    step: int,
    positions: Tensor,
) -> Tensor:
    if rule.selector == "teacher":
        assert guidance is not None
        if rule.unmapped == "mean":
            mean = _scope_mean(guidance, mapped, per_row=rule.scope == "row", group=group)
            guidance = torch.where(mapped, guidance, mean)
        return losses - guidance
    if rule.selector == "student_entropy":
        assert entropies is not None
        return entropies
    return losses if rule.selector == "student_loss" else _hash(positions, rule.seed, step)


def _scope_mean(
    guidance: Tensor, mapped: Tensor, *, per_row: bool, group: dist.ProcessGroup | None
) -> Tensor:
    # Fixed-point integers add up to the same sum in any order, so one process and many ranks get
    # the same mean to the last bit, and hence the same selection. With no mapped token the mean is
    # 0: all tokens then compete by their own loss, and any other constant would rank them alike.
    fixed = (torch.where(mapped, guidance, 0.0).double() * _FIXED_POINT).round().long()
    totals = torch.stack((fixed.sum(-1), mapped.sum(-1)))
    totals = totals if per_row else totals.sum(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(totals, group=group)
    return (totals[0].double() / _FIXED_POINT / totals[1].clamp_min(1)).float().unsqueeze(-1)


def _hash(positions: Tensor, seed: int, step: int) -> Tensor:
    """Map positions to fp32 in 0..1, the same on every device and for every sharding.

    The finaliser of SplitMix64 (Steele et al., 2014); int64 products wrap, as it requires.
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
    losses: Tensor,
    guidance: Tensor | None,
    loss_mask: Tensor,
    rule: SelectionRule,
    group: dist.ProcessGroup | None,
    entropies: Tensor | None,
) -> None:
    if losses.dim() != 2:
        raise ValueError(f"student_losses must be [rows, seq_length], got {tuple(losses.shape)}")
    check_same_shape(losses, loss_mask=loss_mask, guidance=guidance, student_entropies=entropies)
    if rule.selector == "teacher" and guidance is None:
        raise ValueError("selector 'teacher' needs guidance; aggregate_teacher_losses makes it")
    if rule.selector == "student_entropy" and entropies is None:
        raise ValueError(
            "selector 'student_entropy' needs student_entropies; linear_cross_entropy gives them "
            "with with_entropy=True"
        )
    if (rule.scope == "group") != (group is not None):
        raise ValueError(
            f"scope {rule.scope!r} {'needs' if group is None else 'does not take'} a process "
            "group: pass one with scope 'group' and with no other"
        )
