"""Slow, obvious float64 twins of the torch losses: loops over rows, tokens and words."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def aggregate(losses: Array, spans: NDArray[np.int64], how: str) -> Array:
    """Eq. 2, span by span; NaN losses are skipped and NaN is what an empty span gives."""
    result = np.full(spans.shape[:2], np.nan)
    for row, position in np.ndindex(*spans.shape[:2]):
        start, end = spans[row, position]
        covered = [float(loss) for loss in losses[row, start:end] if not math.isnan(loss)]
        if covered:
            total = math.fsum(covered)
            result[row, position] = {
                "mean": total / len(covered),
                "max": max(covered),
                "sum": total,
            }[how]
    return result


def keep_top(scores: Array, competing: Mask, fraction: float) -> Mask:
    """The floor(fraction * competing) highest scores of all rows; the earlier wins a tie."""
    places = [tuple(place) for place in np.argwhere(competing)]
    places.sort(key=lambda place: (-scores[place], place))
    kept = np.zeros_like(competing)
    for place in places[: _floor_of(fraction, len(places))]:
        kept[place] = True
    return kept


def select(
    student_losses: NDArray[np.float32],
    guidance: NDArray[np.float32],
    mask: Mask,
    fraction: float,
    unmapped: str,
) -> Mask:
    """Eq. 4 over one microbatch with the strategies of section 6.2."""
    mapped = mask & ~np.isnan(guidance)
    teacher = guidance.astype(np.float32).copy()
    competing = mapped
    if unmapped == "mean":
        values = [float(value) for value in guidance[mapped]]
        teacher[mask & ~mapped] = math.fsum(values) / len(values) if values else 0.0
        competing = mask
    # The differences are rounded to fp32 as in the product: ties are part of the specification.
    scores = (student_losses - teacher).astype(np.float64)
    kept = keep_top(scores, competing, fraction)
    return kept | (mask & ~mapped) if unmapped == "include" else kept


def token_losses(hidden: Array, weight: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """Cross entropy and entropy of each token, from whole rows of logits."""
    losses, entropies = np.zeros(len(labels)), np.zeros(len(labels))
    for token, label in enumerate(labels):
        log_probabilities = _log_softmax(weight @ hidden[token])
        losses[token] = -log_probabilities[label]
        entropies[token] = -np.sum(np.exp(log_probabilities) * log_probabilities)
    return losses, entropies


def kld(student_logits: Array, teacher_logits: Array) -> Array:
    """KL(teacher || student) of each token."""
    divergences = np.zeros(len(student_logits))
    for token in range(len(student_logits)):
        student = _log_softmax(student_logits[token])
        teacher = _log_softmax(teacher_logits[token])
        for p, q in zip(teacher, student, strict=True):
            divergences[token] += math.exp(p) * (p - q) if p > -math.inf else 0.0
    return divergences


def uld(student_logits: Array, teacher_logits: Array) -> Array:
    """L1 distance of sorted probabilities, the shorter list padded with zeros."""
    distances = np.zeros(len(student_logits))
    for token in range(len(student_logits)):
        student = sorted(np.exp(_log_softmax(student_logits[token])), reverse=True)
        teacher = sorted(np.exp(_log_softmax(teacher_logits[token])), reverse=True)
        for rank in range(max(len(student), len(teacher))):
            p = student[rank] if rank < len(student) else 0.0
            q = teacher[rank] if rank < len(teacher) else 0.0
            distances[token] += abs(p - q)
    return distances


def keep_chunks(
    student_losses: Array,
    teacher_losses: Array,
    student_ids: NDArray[np.int64],
    teacher_ids: NDArray[np.int64],
    mask: Mask,
    fraction: float,
) -> Mask:
    """Tokens of the chunks with the highest mean student minus mean teacher loss, no unmapped."""
    means: dict[tuple[int, int], np.float32] = {}
    for row in range(len(mask)):
        for chunk in range(int(student_ids.max()) + 1):
            student = student_losses[row][(student_ids[row] == chunk) & mask[row]]
            teacher = teacher_losses[row][teacher_ids[row] == chunk]
            teacher = teacher[~np.isnan(teacher)]
            if len(student) and len(teacher):
                difference = np.float32(student.mean()) - np.float32(teacher.mean())
                means[row, chunk] = difference
    order = sorted(means, key=lambda place: (-means[place], place))
    chosen = set(order[: _floor_of(fraction, len(order))])
    kept = np.zeros_like(mask)
    for row, position in np.argwhere(mask):
        kept[row, position] = (row, int(student_ids[row, position])) in chosen
    return kept


def _floor_of(fraction: float, count: int) -> int:
    return math.floor(Fraction(fraction).limit_denominator(10**8) * count)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())
