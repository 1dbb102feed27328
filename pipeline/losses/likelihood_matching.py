"""Approximate Likelihood Matching: the student gives text the likelihood that the teacher gives it.

It needs only the teacher's losses. A chunk is the text between two byte boundaries that both
tokenizations share; its loss is the sum of its tokens' losses.

    student  Pro|b|ability  ,  ·Un|certain|ty
    teacher  Probability    ,  ·Unc|ertainty
    chunks   Probability    ,  ·Uncertainty

The published correction for chunks that only one model would continue is left out: it needs another
stored number per token.

Source: Minixhofer, Vulić and Ponti, arXiv 2503.20083.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.losses.logits import widen
from pipeline.losses.loss_checks import check_finite, check_same_shape
from pipeline.losses.spans import check_spans, span_sums

TEMPERATURE = 100.0
"""Of the paper: likelihoods of chunks of several tokens would all be 0 without it."""
# Nats. The rest of a chunk's probability must be above 0 to have a logarithm.
_MIN_LOSS = 1e-3


def likelihood_divergences(
    student_losses: Tensor,
    teacher_losses: Tensor,
    teacher_spans: Tensor,
    *,
    loss_mask: Tensor,
    teacher_loss_mask: Tensor,
    temperature: float = TEMPERATURE,
    spans_checked: bool = False,
) -> Tensor:
    """Return how far the student's likelihood of each chunk is from the teacher's.

    With p = exp(-loss / temperature) it is temperature * KL(p_teacher || p_student) of two coins.
    At high temperatures the gradient is cross entropy's times `1 - teacher / student`, by the
    chunk's losses: text that both models find equally unlikely teaches nothing.

    Losses, spans and errors are those of `aggregate_teacher_losses`, with masks of the tokens that
    have a loss; a document's first student token must be a label. If `spans_checked`, the host
    doesn't wait for the device. The result, at least fp32 [rows, seq_length], nats, is 0 except at
    the first label of a chunk whose tokens all have a loss.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; the paper takes 100")
    if not spans_checked:
        check_spans(teacher_losses, teacher_spans, teacher_loss_mask)
    check_same_shape(student_losses, loss_mask=loss_mask, teacher_spans=teacher_spans[..., 0])
    mask, has_loss = loss_mask.bool(), teacher_loss_mask.bool()
    counted = {"student_losses": (student_losses, mask)}
    check_finite(counted | {"teacher_losses": (teacher_losses, has_loss)})
    chunks = _find_chunks(teacher_spans, mask, has_loss)
    own = widen(torch.where(chunks.numbers >= 0, student_losses, 0.0))
    of_student = torch.zeros_like(own).scatter_add(-1, chunks.numbers.clamp_min(0), own)
    known = torch.where(has_loss, teacher_losses.detach(), 0.0).double()
    of_teacher = span_sums(known, chunks.teacher_starts, chunks.teacher_stops)
    # Where there is no chunk, equal values keep the logarithms finite; they are left out below.
    one = torch.ones_like(of_student)
    divergences = _coin_divergence(
        torch.where(chunks.whole, of_student, one),
        torch.where(chunks.whole, of_teacher.to(of_student.dtype), one),
        temperature,
    )
    divergences = torch.where(chunks.whole, divergences, 0.0)
    # From chunk number to its first label.
    at_label = divergences.gather(-1, chunks.numbers.clamp_min(0))
    return torch.where(chunks.opens, at_label, 0.0)


@dataclass(frozen=True)
class _Chunks:
    """The chunks of each row, by number; all [rows, seq_length].

    Attributes:
        numbers: each label's chunk; -1 if no teacher token covers it.
        opens: labels that begin a chunk.
        teacher_starts, teacher_stops: each chunk's teacher tokens.
        whole: chunks whose tokens all have a loss.
    """

    numbers: Tensor
    opens: Tensor
    teacher_starts: Tensor
    teacher_stops: Tensor
    whole: Tensor


@torch.no_grad()
def _find_chunks(teacher_spans: Tensor, loss_mask: Tensor, teacher_loss_mask: Tensor) -> _Chunks:
    """Find the chunks: no teacher token crosses a common boundary.

    The spans 0-1, 0-1, 1-2, 2-4, 3-4 are in the chunks 0, 0, 1, 2, 2.
    """
    starts, stops = teacher_spans.long().unbind(-1)
    mapped = stops > starts
    reached = torch.where(mapped, stops, 0).cummax(-1).values
    opens = mapped & (starts >= torch.nn.functional.pad(reached[..., :-1], (1, 0)))
    numbers = torch.where(mapped, opens.cumsum(-1) - 1, -1)
    place = numbers.clamp_min(0)
    nothing = torch.zeros_like(starts)
    teacher_starts = nothing.scatter_add(-1, place, torch.where(opens, starts, 0))
    teacher_stops = nothing.scatter_reduce(-1, place, torch.where(mapped, stops, 0), "amax")
    num_labels = nothing.scatter_add(-1, place, mapped.long())
    num_learned = nothing.scatter_add(-1, place, (mapped & loss_mask).long())
    num_silent = span_sums((~teacher_loss_mask).long(), teacher_starts, teacher_stops)
    whole = (num_labels > 0) & (num_learned == num_labels) & (num_silent == 0)
    return _Chunks(numbers, opens, teacher_starts, teacher_stops, whole)


def _coin_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return temperature * KL(teacher || student) of "this chunk" against "any other"."""
    student = student.clamp_min(_MIN_LOSS) / temperature
    teacher = teacher.clamp_min(_MIN_LOSS) / temperature
    this = torch.exp(-teacher) * (student - teacher)
    # log(1 - exp(-loss)), exact for small losses.
    others = torch.log(-torch.expm1(-teacher)) - torch.log(-torch.expm1(-student))
    return temperature * (this - torch.expm1(-teacher) * others)
