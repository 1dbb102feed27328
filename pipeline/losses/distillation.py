"""Distillation, the paper's comparison: cross entropy plus a divergence per token.

Kullback-Leibler distillation (KLD) needs one vocabulary. Universal logit distillation (ULD)
compares sorted probabilities of any two: at a uniform cost, their L1 distance is the Wasserstein
distance. As published, it pairs a document's t-th student and teacher tokens, unaligned.

Source: VocAgnoLM (arXiv 2503.19123), Eq. 5 and 6, appendix B; Boizard et al. (arXiv 2402.12030).
"""

import torch
from torch import Tensor

from pipeline.losses.logits import widen
from pipeline.losses.loss_checks import check_finite, check_same_shape
from pipeline.losses.loss_result import LossResult


def distillation_loss(
    student_losses: Tensor,
    divergences: Tensor,
    *,
    loss_mask: Tensor,
    weight: float,
    kept: Tensor | None = None,
) -> LossResult:
    """Add divergences, weighted by λ, to the cross entropy of the tokens that count.

    The paper's λ is 1 for KLD (Eq. 5) and 0.5 for ULD (Eq. 6). Cross entropy is of the `kept`
    labels, None: of all; divergences count either way. Metrics are `student_loss`, `divergence`
    and, with `kept`, `kept_fraction`.
    """
    check_same_shape(student_losses, divergences=divergences, loss_mask=loss_mask, kept=kept)
    if not weight >= 0:
        raise ValueError(f"weight must not be negative, got {weight}: it is the λ of Eq. 5 and 6")
    mask = loss_mask.bool()
    check_finite({"student_losses": (student_losses, mask), "divergences": (divergences, mask)})
    losses = torch.where(mask, widen(student_losses), 0.0)
    cross_entropy, count = losses.sum(), mask.sum()
    divergence = torch.where(mask, divergences.to(losses.dtype), 0.0).sum()
    metrics = {
        "student_loss": torch.stack((cross_entropy.detach(), count)).double(),
        "divergence": torch.stack((divergence.detach(), count)).double(),
    }
    if kept is not None:
        cross_entropy = torch.where(kept, losses, 0.0).sum()
        metrics["kept_fraction"] = torch.stack(((kept & mask).sum(), count)).double()
    return LossResult(cross_entropy + weight * divergence, count, metrics)


def kld_losses(
    student_logits: Tensor, teacher_logits: Tensor, *, vocab_size: int | None = None
) -> Tensor:
    """Give KL(student || teacher) of each token, nats, for models that share a tokenizer.

    Logits are float [..., V], the student's with a gradient; the result is at least fp32 [...],
    infinite where only the teacher excludes a token. Columns from `vocab_size` on are padding;
    None: all count, equally many for both.

    Source: Eq. 5.
    """
    _check_inputs(student_logits, teacher_logits, vocab_size)
    student = widen(student_logits[..., :vocab_size]).log_softmax(-1)
    teacher = widen(teacher_logits[..., :vocab_size].detach()).log_softmax(-1)
    # A token that the student excludes adds 0, also if the teacher does. It leaves before the
    # product: a derivative of 0 * -inf would be NaN even where its value is replaced.
    excluded = student == -torch.inf
    difference = student.masked_fill(excluded, 0.0) - teacher.masked_fill(excluded, 0.0)
    return (student.exp() * difference).sum(-1)


def _check_inputs(student_logits: Tensor, teacher_logits: Tensor, vocab_size: int | None) -> None:
    sizes = student_logits.shape[-1], teacher_logits.shape[-1]
    if vocab_size is None and sizes[0] != sizes[1]:
        raise ValueError(
            f"kld needs one vocabulary, but the student has {sizes[0]} and the teacher {sizes[1]} "
            "columns: give vocab_size, the tokenizer's, if only the padding differs, or use uld"
        )
    if vocab_size is not None and not 1 <= vocab_size <= min(sizes):
        raise ValueError(
            f"vocab_size {vocab_size} must lie in 1..{min(sizes)}, the columns that both models "
            "have"
        )
    if student_logits.shape[:-1] != teacher_logits.shape[:-1]:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits "
            f"{tuple(teacher_logits.shape)} must be of the same tokens"
        )


def uld_losses(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Give the L1 distance of the sorted probabilities of each pair of tokens, in 0..2.

    Logits are float [..., V] of either model, the student's with a gradient; the result is at least
    fp32 [...].

    Source: Eq. 6.
    """
    if student_logits.shape[:-1] != teacher_logits.shape[:-1]:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits "
            f"{tuple(teacher_logits.shape)} must hold pairs of tokens: truncated_pairs makes them"
        )
    width = max(student_logits.shape[-1], teacher_logits.shape[-1])
    student = _sorted_probabilities(student_logits, width)
    return (student - _sorted_probabilities(teacher_logits.detach(), width)).abs().sum(-1)


def truncated_pairs(
    student_cu_seqlens: Tensor, teacher_cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Pair the t-th student token of each segment with its t-th teacher token.

    Takes each side's segment bounds, int [segments + 1]; returns student and teacher indices, int64
    [pairs].
    """
    if student_cu_seqlens.shape != teacher_cu_seqlens.shape:
        raise ValueError(
            f"student_cu_seqlens has {student_cu_seqlens.numel() - 1} segments and "
            f"teacher_cu_seqlens {teacher_cu_seqlens.numel() - 1}: they must be of the same "
            "documents"
        )
    student, teacher = student_cu_seqlens.long(), teacher_cu_seqlens.long()
    lengths = torch.minimum(student.diff(), teacher.diff())
    firsts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    within = torch.arange(len(firsts), device=lengths.device) - firsts
    return (
        within + student[:-1].repeat_interleave(lengths),
        within + teacher[:-1].repeat_interleave(lengths),
    )


def truncated_turns(
    loss_mask: Tensor, teacher_spans: Tensor, teacher_has_loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Pair the labels of each turn with the places that predict the teacher's tokens of it.

    Chat templates differ in length, so segments' t-th tokens don't correspond. A turn is a run of
    labels; its first mapped label is paired with the place before its first teacher token, and so
    on, until either side ends. The result is as in `truncated_pairs`, of rows laid end to end.
    """
    counted = loss_mask.bool()
    begins = counted.clone()
    begins[:, 1:] &= ~counted[:, :-1]
    run = begins.flatten().cumsum(0) - 1
    places = torch.arange(counted.numel(), device=run.device)
    starts, stops = teacher_spans.flatten(0, 1).long().unbind(-1)
    mapped = counted.flatten() & (stops > starts)
    num_runs = int(begins.sum())
    first = places.new_full((num_runs,), counted.numel())
    first.scatter_reduce_(0, run[mapped], places[mapped], "amin")
    ends = places.new_zeros(num_runs).scatter_reduce_(0, run[mapped], stops[mapped], "amax")
    chosen = places[counted.flatten()]
    chosen = chosen[chosen >= first[run[chosen]]]
    taught = starts[first[run[chosen]]] + chosen - first[run[chosen]]
    inside = taught < ends[run[chosen]]
    chosen, taught = chosen[inside], taught[inside]
    taught = taught + chosen // counted.shape[1] * teacher_has_loss.shape[1]
    known = teacher_has_loss.flatten()[taught]
    return chosen[known], taught[known] - 1


def _sorted_probabilities(logits: Tensor, width: int) -> Tensor:
    sorted_ones = widen(logits).softmax(-1).sort(-1, descending=True).values
    return torch.nn.functional.pad(sorted_ones, (0, width - logits.shape[-1]))
