"""The student's step: its loss and metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_plugin.models.label_scores import score_labels
from megatron_plugin.models.places import gather_places, own_share
from megatron_plugin.student.micro_batch import MicroBatch
from megatron_plugin.upstream import parallel_state
from pipeline.losses.cross_entropy import TokenScores
from pipeline.losses.divergences import LabelDistributions
from pipeline.losses.loss_result import LossResult
from pipeline.methods.kind import MethodKind
from pipeline.methods.method import Method
from pipeline.methods.micro_batch_loss import MicroBatchLoss

_NO_TOKENS = 1e-9

# Megatron's loss function returns the sum, the number of tokens and the metrics to report.
Reported = tuple[Tensor, Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class StepRules:
    """A method and its options.

    `vocab_size` excludes the embedding's padding; `num_microbatches` is per training step.
    """

    kind: MethodKind
    method: Method
    vocab_size: int
    num_microbatches: int


def run_forward_step(
    rules: StepRules, batches: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], Reported]]:
    """Run a micro-batch through this rank's stage; return output and loss function."""
    batch = next(batches)
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.segments,
        output_processor=partial(_token_scores, rules, batch.next_tokens, batch.moved["labels"]),
    )
    loss = training_loss if model.training else validation_loss
    return losses, partial(loss, rules, batch)


def training_loss(rules: StepRules, batch: MicroBatch, output: Tensor) -> Reported:
    """Return a micro-batch's guided loss."""
    result = _result(rules, batch, output)
    return result.loss_sum, result.num_tokens.int(), _metrics(rules, batch, result)


def validation_loss(rules: StepRules, batch: MicroBatch, output: Tensor) -> Reported:
    """Return a micro-batch's plain loss, and the guided one as a metric."""
    result = _result(rules, batch, output)
    reported = {"lm loss": result.metrics["student_loss"].float()}
    if rules.kind.selector != "full":
        reported["guided loss"] = _pair(result.loss_sum.detach(), result.num_tokens)
    return result.loss_sum, result.num_tokens.int(), reported


@dataclass(frozen=True, kw_only=True)
class MegatronPass(MicroBatchLoss):
    """A micro-batch that Megatron's model has read.

    Ranks that share rows each make the whole loss: sums, counts and gradients are multiplied by
    their number. `output` is from `_token_scores`, of this rank's places.
    """

    micro_batch: MicroBatch
    output: Tensor

    @cached_property
    def scores(self) -> TokenScores:
        """See `MicroBatchLoss`."""
        sharing_rows = parallel_state.get_context_parallel_group()
        whole = gather_places(self.output.movedim(-1, 0), sharing_rows).movedim(0, -1)
        if whole.dim() == 2:
            return TokenScores(whole, None)
        num_entropies = int(self.rule.ranks_by_entropy)
        entropies = whole[1].detach() if num_entropies else None
        if self.distributions is None:
            return TokenScores(whole[0], entropies)
        return TokenScores(whole[0], entropies, whole[1 + num_entropies :].movedim(0, -1))

    @property
    def distributions(self) -> LabelDistributions | None:
        """See `MicroBatchLoss`."""
        return self.micro_batch.next_tokens

    @property
    def known_losses(self) -> Tensor:
        """See `MicroBatchLoss`."""
        assert self.micro_batch.taught is not None
        return self.micro_batch.taught.losses

    @property
    def loss_mask(self) -> Tensor:
        """Excludes documents with broken teacher's losses."""
        return self.micro_batch.loss_mask

    @property
    def teacher_has_loss(self) -> Tensor:
        """See `MicroBatchLoss`."""
        taught = self.micro_batch.taught
        return self.batch.teacher_has_loss if taught is None else ~taught.losses.isnan()


def _result(rules: StepRules, batch: MicroBatch, output: Tensor) -> LossResult:
    rule = rules.kind.rule(rules.method)
    in_group = rule.scope == "group"
    given = MegatronPass(
        method=rules.method,
        batch=batch.moved,
        rule=rule,
        group=parallel_state.get_data_parallel_group() if in_group else None,
        step=rules.method.draw_of(
            batch.number,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        ),
        weight=rules.kind.weight_of(rules.method),
        widest_span=batch.widest_span,
        micro_batch=batch,
        output=output,
    )
    return rules.kind.loss(given)


def _metrics(rules: StepRules, batch: MicroBatch, result: LossResult) -> dict[str, Tensor]:
    """Return sums and counts, which Megatron adds up and divides."""
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
    taught = batch.taught
    if taught is not None and taught.waited_seconds is not None:
        waited = torch.full((), 1000 * taught.waited_seconds, device=device)
        reported["vocag/teacher_wait_ms"] = _pair(waited, per_step)
    return reported


def _token_scores(
    rules: StepRules,
    next_tokens: LabelDistributions | None,
    whole_labels: Tensor,
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels: Tensor,
    **_: Any,
) -> Tensor:
    """Return losses, fp32 [b, s], instead of GPTModel's own last lines.

    If needed, [1 + 1 + 1 + K, b, s]: losses, entropies, and log-probabilities for known
    distributions.
    """
    entry_ids = cells = None
    if next_tokens is not None:
        whole = next_tokens.asked_of(whole_labels)
        entry_ids, cells = own_share().take(whole).transpose(0, 1), next_tokens.cells
    scores = score_labels(
        hidden_states,
        output_layer,
        output_weight,
        labels.transpose(0, 1),
        vocab_size=rules.vocab_size,
        with_entropy=rules.kind.rule(rules.method).ranks_by_entropy,
        entry_ids_obk=entry_ids,
        cells=cells,
    )
    losses = scores.losses.transpose(0, 1)
    more = []
    if scores.entropies is not None:
        more.append(scores.entropies.transpose(0, 1).unsqueeze(0))
    if scores.entry_log_probs is not None:
        more.append(scores.entry_log_probs.permute(2, 1, 0))
    return torch.cat((losses.unsqueeze(0), *more)) if more else losses


def _never_nan(pair: Tensor) -> Tensor:
    """Give 0 for no tokens: one NaN would spoil a log interval's mean."""
    return torch.stack((pair[0], pair[1] + _NO_TOKENS))


def _pair(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.stack((numerator.float(), denominator.float()))
