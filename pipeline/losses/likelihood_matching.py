"""Approximate Likelihood Matching: the student gives text the likelihood that the teacher gives it.

Selection takes from a teacher which tokens count. This takes how likely it finds them, and still
needs no more than its losses, stored or online. Between two byte boundaries that both tokenizations
share lies a chunk; both models have a likelihood of it, the sum of their tokens' losses.

    student  Pro|b|ability  ,  ·Un|certain|ty
    teacher  Probability    ,  ·Unc|ertainty
    chunks   Probability    ,  ·Uncertainty

The published method also makes up for a chunk that one model would continue and the other would
end; that takes a number more per token, which is not stored, and is left out.

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
# Nats. A chunk that a model is sure of has no logarithm of what remains.
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

    With p = exp(-loss / temperature) for both models it is the KL divergence of two coins,
    KL(p_teacher || p_student), times the temperature. For high temperatures that is `student -
    teacher + teacher * log(teacher / student)` of the chunk's losses, so the gradient is cross
    entropy's times `1 - teacher / student`: text that both models find equally unlikely teaches
    nothing.

    Args:
        student_losses: float [rows, seq_length], nats, with a gradient.
        teacher_losses: float [rows, teacher_seq_length], nats, of the teacher's own tokens.
        teacher_spans: int [rows, seq_length, 2], as in `aggregate_teacher_losses`, of documents
            whose first student token is a label, too.
        loss_mask: bool or float [rows, seq_length].
        teacher_loss_mask: bool [rows, teacher_seq_length], which teacher tokens have a loss.
        temperature: divides the losses.
        spans_checked: whether spans are known to be sound: then the host doesn't wait for the
            device to check them.

    Returns:
        fp32 (fp64 for fp64 losses) [rows, seq_length], nats: a chunk's divergence at its first
        label, 0 elsewhere, and 0 for chunks of which either model lacks a loss.

    Raises:
        NonFiniteLossError: NaN or infinite losses where a mask counts; names the row.
        ValueError: shapes disagree, a span leaves the row, or the temperature is not positive.

    Example:
        >>> likelihood_divergences(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]),
        ...     torch.tensor([[[0, 1], [0, 1]]]), loss_mask=torch.ones(1, 2),
        ...     teacher_loss_mask=torch.ones(1, 1, dtype=torch.bool))
        tensor([[0., 0.]])

    Source: arXiv 2503.20083, section 3, with the divergence that it reports.
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
    """The text between common boundaries, as tokens; chunk c of a row is at place c.

    Attributes, all [rows, seq_length]:
        numbers: each label's chunk; -1: no teacher token covers the label, so it is in none.
        opens: labels that are the first of their chunk.
        teacher_starts, teacher_stops: the teacher tokens of each chunk.
        whole: chunks all of whose tokens have a loss.
    """

    numbers: Tensor
    opens: Tensor
    teacher_starts: Tensor
    teacher_stops: Tensor
    whole: Tensor


@torch.no_grad()
def _find_chunks(teacher_spans: Tensor, loss_mask: Tensor, teacher_loss_mask: Tensor) -> _Chunks:
    """Find the chunks between boundaries that both tokenizations share, from the spans alone.

    Between two student tokens there is a common boundary if no teacher token crosses it: if the
    spans so far end before the next one starts. The spans 0-1, 0-1, 1-2, 2-4, 3-4 are in the chunks
    0, 0, 1, 2, 2.
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
