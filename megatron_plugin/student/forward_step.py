"""The student's step: per-token losses, which of them count, and what is reported.

Dimensions: s places of a row, b rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_plugin.models.output_layer import score_labels
from megatron_plugin.models.places import gather_places, own_share
from megatron_plugin.student.batch import MicroBatch
from megatron_plugin.upstream import parallel_state
from pipeline.guidance import (
    LossResult,
    Selection,
    SelectionRule,
    guided_loss,
    select_tokens,
)
from pipeline.guidance.cross_entropy import TokenScores
from pipeline.guidance.distributions import distilled_loss
from pipeline.guidance.loss import mapped_tokens
from pipeline.training.distributions import LabelDistributions
from pipeline.training.method import Method

_NO_TOKENS = 1e-9

# Megatron's loss function returns the sum, the number of tokens and what to report of them.
Reported = tuple[Tensor, Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class StepRules:
    """How a step's loss is made.

    Attributes:
        rule: which student tokens count.
        method: its options, with the name and the weight that hold.
        vocab_size: tokens of the student, without the padding of its embedding.
        num_microbatches: of a training step.
    """

    rule: SelectionRule
    method: Method
    vocab_size: int
    num_microbatches: int


def run_forward_step(
    rules: StepRules, batches: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], Reported]]:
    """Run one micro-batch through this rank's stage; return its output and its loss function."""
    batch = next(batches)
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.segments,
        output_processor=partial(_token_scores, rules, batch.next_tokens),
    )
    loss = training_loss if model.training else validation_loss
    return losses, partial(loss, rules, batch)


def training_loss(rules: StepRules, batch: MicroBatch, output: Tensor) -> Reported:
    """Return the guided loss of a micro-batch.

    Args:
        rules: how.
        batch: with guidance if there is a teacher.
        output: as `_token_scores` returns it; of this rank's places only where context-parallel
            ranks share rows.
    """
    result = _result(rules, batch, output)
    return result.loss_sum, result.num_tokens.int(), _metrics(rules, batch, result)


def validation_loss(rules: StepRules, batch: MicroBatch, output: Tensor) -> Reported:
    """Return the plain loss of a micro-batch, and the guided loss next to it."""
    result = _result(rules, batch, output)
    reported = {"lm loss": result.metrics["student_loss"].float()}
    if rules.rule.selector != "full":
        reported["guided loss"] = _pair(result.loss_sum.detach(), result.num_tokens)
    return result.loss_sum, result.num_tokens.int(), reported


def _result(rules: StepRules, batch: MicroBatch, output: Tensor) -> LossResult:
    """Sum the losses of this rank's places."""
    method, known = rules.method, batch.next_tokens
    if known is None:
        own_losses = output[0] if rules.rule.ranks_by_entropy else output
        selection = _own_part(_select(rules, batch, output))
        return guided_loss(own_losses, selection, expectation=method.expectation)
    take, chosen = own_share().take, None
    if method.distill_tokens != "all":
        kept = take(_select(rules, batch, output[0]).kept)
        chosen = kept if method.distill_tokens == "kept" else ~kept
    assert method.weight is not None
    return distilled_loss(
        TokenScores(output[0], None, output[1:].movedim(0, -1)),
        take(known.ids),
        take(known.probs),
        loss_mask=take(batch.loss_mask),
        weight=method.weight,
        chosen=chosen,
        temperature=method.temperature,
        reverse=method.reverse_kl,
    )


def _select(rules: StepRules, batch: MicroBatch, output: Tensor) -> Selection:
    """Choose among all places of the rows, by this rank's losses, or losses and entropies."""
    with_entropy = rules.rule.ranks_by_entropy
    sharing_rows = parallel_state.get_context_parallel_group()
    whole = gather_places(output.detach().movedim(-1, 0), sharing_rows).movedim(0, -1)
    losses, entropies = (whole[0], whole[1]) if with_entropy else (whole, None)
    # Without a teacher, too, unmapped tokens are treated as the rule says, so that selectors differ
    # in nothing but their ranking.
    mapped = None
    if batch.guidance is None and rules.rule.selector != "full":
        rows = batch.moved
        mapped = mapped_tokens(rows["teacher_spans"], rows.teacher_has_loss, checked=True)
    shared = rules.rule.scope == "group"
    return select_tokens(
        losses,
        batch.guidance,
        loss_mask=batch.loss_mask,
        rule=rules.rule,
        group=parallel_state.get_data_parallel_group() if shared else None,
        teacher_losses=batch.teacher_losses,
        mapped=mapped,
        student_entropies=entropies,
        step=batch.number,
    )


def _own_part(selection: Selection) -> Selection:
    """Return what was chosen among this rank's places; ranks' sums and counts are added later."""
    take = own_share().take
    return replace(
        selection,
        kept=take(selection.kept),
        mapped=take(selection.mapped),
        loss_mask=take(selection.loss_mask),
        guidance=None if selection.guidance is None else take(selection.guidance),
    )


def _metrics(rules: StepRules, batch: MicroBatch, result: LossResult) -> dict[str, Tensor]:
    """Return sums and counts; Megatron adds them over micro-batches and replicas, then divides."""
    reported = {"lm loss": result.metrics["student_loss"].float()}
    reported["guided loss"] = _pair(result.loss_sum.detach(), result.num_tokens)
    for name, value in result.metrics.items():
        if name != "student_loss":
            reported[f"vocag/{name}"] = _never_nan(value.float())
    device = result.num_tokens.device
    # Mean over the replicas of the sum over a step's micro-batches.
    per_step = torch.full((), 1.0 / rules.num_microbatches, device=device)
    replicas = parallel_state.get_data_parallel_world_size()
    reported["vocag/quarantined_tokens"] = _pair(batch.num_quarantined.sum(), per_step / replicas)
    if batch.waited_seconds is not None:
        waited = torch.full((), 1000 * batch.waited_seconds, device=device)
        reported["vocag/teacher_wait_ms"] = _pair(waited, per_step)
    return reported


def _token_scores(
    rules: StepRules,
    next_tokens: LabelDistributions | None,
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels: Tensor,
    **_: Any,
) -> Tensor:
    """Return fp32 [b, s] losses; GPTModel calls it in place of its own last lines.

    Where tokens are ranked by entropies [2, b, s], losses and entropies; with next tokens
    [1 + K, b, s], losses and their log-probabilities.
    """
    entry_ids = None if next_tokens is None else own_share().take(next_tokens.ids)
    scores = score_labels(
        hidden_states,
        output_layer,
        output_weight,
        labels.transpose(0, 1),
        vocab_size=rules.vocab_size,
        with_entropy=rules.rule.ranks_by_entropy,
        entry_ids_obk=None if entry_ids is None else entry_ids.transpose(0, 1),
    )
    losses = scores.losses.transpose(0, 1)
    if scores.entropies is not None:
        return torch.stack((losses, scores.entropies.transpose(0, 1)))
    if scores.entry_log_probs is None:
        return losses
    return torch.cat((losses.unsqueeze(0), scores.entry_log_probs.permute(2, 1, 0)))


def _never_nan(pair: Tensor) -> Tensor:
    """Return a sum and its count so that no tokens give 0; fp32 counts don't change.

    Megatron divides, and one NaN would spoil the mean of a whole log interval.
    """
    return torch.stack((pair[0], pair[1] + _NO_TOKENS))


def _pair(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.stack((numerator.float(), denominator.float()))
