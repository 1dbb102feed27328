"""A batch's loss by each method: the selectors of the paper and the systems it compares with."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.guidance import (
    LossResult,
    Selection,
    SelectionRule,
    aggregate_teacher_losses,
    guided_loss,
    select_tokens,
)
from pipeline.guidance.baselines import kld, uld
from pipeline.guidance.baselines.chunking import row_chunk_ids, select_chunks
from pipeline.guidance.baselines.distillation import distillation_loss
from pipeline.guidance.baselines.kld import kld_losses
from pipeline.guidance.baselines.rho1 import select_by_reference, select_by_self_reference
from pipeline.guidance.baselines.uld import place_at, truncated_pairs, uld_losses
from pipeline.guidance.cross_entropy import (
    TokenScores,
    linear_cross_entropy,
    map_token_chunks,
    score_tokens,
)
from pipeline.guidance.likelihood_matching import WEIGHT as ALM_WEIGHT
from pipeline.guidance.likelihood_matching import likelihood_divergences
from pipeline.guidance.loss import mapped_tokens
from pipeline.models.hf_models import hidden_states
from pipeline.models.output_layer import output_layer
from pipeline.streaming import Rows
from pipeline.training.method import NEED_LOSSES, Method
from pipeline.training.sources import losses_by_source


def batch_loss(
    method: Method,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: Rows,
    step: int,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> LossResult:
    """Run the student, and the teacher if the method needs it, over a micro-batch.

    Args:
        method: what to compute.
        student: trained.
        teacher: frozen; for rho1 the reference model; None also where rows hold its losses.
        batch: rows of `pipeline.streaming`, on the models' device.
        step: of training; random choices are drawn anew for each.
        group: the processes that choose together where the method's scope is "group"; None: this
            one alone, whose micro-batch is then the group's.
        vocab_size: of the tokenizer that kld's models share; their further rows are padding.

    Example:
        >>> batch_loss(Method("full"), student, None, batch, 0).loss_sum.backward()
    """
    hidden = _student_states(student, batch)
    scores = linear_cross_entropy(
        hidden,
        output_layer(student),
        batch["labels"].long(),
        loss_mask=batch["loss_mask"],
        with_entropy=method.name == "student_entropy",
    )
    result = _loss_of(method, scores, hidden, student, teacher, batch, step, group, vocab_size)
    by_source = losses_by_source(scores.losses.detach(), batch)
    return replace(result, metrics=result.metrics | by_source)


def _loss_of(
    method: Method,
    scores: TokenScores,
    hidden: Tensor,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: Rows,
    step: int,
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> LossResult:
    if method.name in ("kld", "uld"):
        assert teacher is not None
        if method.name == "kld":
            divergences = _kld(method, student, teacher, hidden, batch, vocab_size)
        else:
            divergences = _uld(student, teacher, hidden, batch)
        paper = kld.WEIGHT if method.name == "kld" else uld.WEIGHT
        return distillation_loss(
            scores.losses,
            divergences,
            loss_mask=batch["loss_mask"],
            weight=paper if method.weight is None else method.weight,
        )
    of_teacher = _losses_of_teacher(teacher, batch) if method.name in NEED_LOSSES else None
    selection = _select(method, scores, teacher, of_teacher, batch, step, group)
    if method.name == "alm":
        assert of_teacher is not None
        return _matched_likelihoods(method, scores.losses, of_teacher, selection, batch)
    return guided_loss(scores.losses, selection, expectation=method.expectation)


@torch.no_grad()
def compute_teacher_losses(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    """Return the teacher's loss of each of its own tokens, fp32 [rows, T]; NaN: none."""
    return score_tokens(
        _teacher_states(teacher, batch),
        output_layer(teacher),
        batch["teacher_input_ids"].long(),
        teacher_loss_mask=batch.teacher_has_loss,
    )


def _select(
    method: Method,
    scores: TokenScores,
    teacher: PreTrainedModel | None,
    of_teacher: Tensor | None,
    batch: Rows,
    step: int,
    group: dist.ProcessGroup | None,
) -> Selection:
    losses, mask = scores.losses, batch["loss_mask"]
    rule, group = _rule_of(method, group)
    if method.name in ("rho1", "rho1_self"):
        assert teacher is not None
        return _select_by_reference(method, scores, teacher, batch, group)
    guidance = mapped = None
    if method.name in ("chunks", "chunks_random"):
        return _select_chunks(method, losses, of_teacher, batch, step, group)
    if of_teacher is None:
        mapped = mapped_tokens(batch["teacher_spans"], batch.teacher_has_loss)
    else:
        guidance = aggregate_teacher_losses(
            of_teacher,
            batch["teacher_spans"],
            method.aggregation,
            teacher_loss_mask=batch.teacher_has_loss,
        )
    return select_tokens(
        losses,
        guidance,
        loss_mask=mask,
        rule=rule,
        group=group,
        teacher_losses=of_teacher,
        mapped=mapped,
        student_entropies=scores.entropies,
        step=step,
    )


def _rule_of(
    method: Method, group: dist.ProcessGroup | None
) -> tuple[SelectionRule, dist.ProcessGroup | None]:
    """Return the rule and the group that it is for; one process is a group of its own."""
    if method.scope != "group":
        return method.rule, None
    return (method.rule if group else replace(method.rule, scope="microbatch")), group


def _losses_of_teacher(teacher: PreTrainedModel | None, batch: Rows) -> Tensor:
    """Return the losses that the rows hold, or the teacher's own; NaN for padding."""
    if "teacher_losses" in batch:
        return batch["teacher_losses"].masked_fill(~batch.teacher_has_loss, torch.nan)
    assert teacher is not None
    return compute_teacher_losses(teacher, batch)


def _matched_likelihoods(
    method: Method, losses: Tensor, of_teacher: Tensor, selection: Selection, batch: Rows
) -> LossResult:
    divergences = likelihood_divergences(
        losses,
        of_teacher,
        batch["teacher_spans"],
        loss_mask=batch["loss_mask"],
        teacher_loss_mask=batch.teacher_has_loss,
    )
    return distillation_loss(
        losses,
        divergences,
        loss_mask=batch["loss_mask"],
        weight=ALM_WEIGHT if method.weight is None else method.weight,
        kept=selection.kept,
    )


@torch.no_grad()
def _select_by_reference(
    method: Method,
    scores: TokenScores,
    teacher: PreTrainedModel,
    batch: Rows,
    group: dist.ProcessGroup | None,
) -> Selection:
    reference = linear_cross_entropy(
        _student_states(teacher, batch),
        output_layer(teacher),
        batch["labels"].long(),
        loss_mask=batch["loss_mask"],
        with_entropy=method.name == "rho1_self",
    )
    if reference.entropies is not None:
        return select_by_self_reference(
            reference.losses,
            reference.entropies,
            loss_mask=batch["loss_mask"],
            keep_fraction=method.share,
            scope=_rule_of(method, group)[0].scope,
            group=group,
        )
    return select_by_reference(
        scores.losses,
        reference.losses,
        loss_mask=batch["loss_mask"],
        keep_fraction=method.share,
        scope=_rule_of(method, group)[0].scope,
        group=group,
    )


def _select_chunks(
    method: Method,
    losses: Tensor,
    of_teacher: Tensor | None,
    batch: Rows,
    step: int,
    group: dist.ProcessGroup | None,
) -> Selection:
    def ids(bounds: str, is_text: Tensor) -> Tensor:
        return row_chunk_ids(batch[bounds], is_text, method.num_chunks, chunk_of=method.chunk_of)

    # Place t predicts token t + 1, so it belongs to that token's chunk.
    of_labels = ids("cu_seqlens", batch.student_is_text).roll(-1, dims=1)
    num_parts = 1 if method.chunk_of == "row" else batch["cu_seqlens"].shape[1] - 1
    return select_chunks(
        losses,
        of_teacher,
        student_chunk_ids=of_labels.masked_fill(~batch["loss_mask"].bool(), -1),
        teacher_chunk_ids=ids("teacher_cu_seqlens", batch.teacher_is_text),
        num_chunks=method.num_chunks * num_parts,
        loss_mask=batch["loss_mask"],
        rule=_rule_of(method, group)[0],
        group=group,
        step=step,
    )


def _kld(
    method: Method,
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    hidden: Tensor,
    batch: Rows,
    vocab_size: int | None,
) -> Tensor:
    """Return the divergence of each label's predictions, [rows, T]; 0 where none counts."""
    with torch.no_grad():
        teacher_hidden = _student_states(teacher, batch)
    counted = batch["loss_mask"].bool()
    values = map_token_chunks(
        lambda s, t: kld_losses(
            output_layer(student).logits(s),
            output_layer(teacher).logits(t),
            vocab_size=vocab_size,
            direction=method.kld_direction,
        ),
        hidden[counted],
        teacher_hidden[counted],
    )
    places = counted.flatten().nonzero().squeeze(-1)
    return place_at(values, places, counted.numel()).view(counted.shape)


def _uld(student: PreTrainedModel, teacher: PreTrainedModel, hidden: Tensor, batch: Rows) -> Tensor:
    """Return the distance of each label's distribution from the teacher's of the same number."""
    with torch.no_grad():
        teacher_hidden = _teacher_states(teacher, batch)
    counted = batch["loss_mask"].bool().flatten()
    bounds = (batch["cu_seqlens"], batch["teacher_cu_seqlens"])
    student_places, teacher_places = truncated_pairs(*map(_joined_bounds, bounds))
    used = counted[student_places]
    student_places, teacher_places = student_places[used], teacher_places[used]
    values = map_token_chunks(
        lambda s, t: uld_losses(output_layer(student).logits(s), output_layer(teacher).logits(t)),
        hidden.flatten(0, 1)[student_places],
        teacher_hidden.flatten(0, 1)[teacher_places],
    )
    return place_at(values, student_places, counted.numel()).view(batch["labels"].shape)


def _joined_bounds(cu_seqlens: Tensor) -> Tensor:
    """Return the segment bounds of all rows laid end to end; each row ends with its length."""
    seq_length = cu_seqlens[0, -1]
    starts = torch.arange(len(cu_seqlens), device=cu_seqlens.device) * seq_length
    bounds = cu_seqlens[:, :-1] + starts[:, None]
    return torch.cat([bounds.flatten(), (len(cu_seqlens) * seq_length).view(1)])


def _student_states(model: PreTrainedModel, batch: Rows) -> Tensor:
    return hidden_states(
        model,
        batch["input_ids"],
        position_ids=batch["position_ids"],
    )


def _teacher_states(teacher: PreTrainedModel, batch: Rows) -> Tensor:
    return hidden_states(
        teacher,
        batch["teacher_input_ids"],
        position_ids=batch["teacher_position_ids"],
    )
