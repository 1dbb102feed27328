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
    *,
    teacher_losses: NDArray[np.float32],
    selector: str = "teacher",
) -> Mask:
    """Eq. 4 over one microbatch with the strategies of section 6.2."""
    mapped = mask & ~np.isnan(guidance)
    teacher = guidance.astype(np.float32).copy()
    competing = mapped
    if unmapped == "mean":
        # "The average of all teacher token losses within a batch", mapped to or not.
        losses = [float(loss) for loss in teacher_losses.flatten() if not math.isnan(loss)]
        teacher[mask & ~mapped] = math.fsum(losses) / len(losses) if losses else 0.0
        competing = mask
    # The differences are rounded to fp32 as in the product: ties are part of the specification.
    ranked = -teacher if selector == "teacher_loss" else student_losses - teacher
    kept = keep_top(ranked.astype(np.float64), competing, fraction)
    return kept | (mask & ~mapped) if unmapped == "include" else kept


def easiest(losses: Array, entropies: Array, mask: Mask, fraction: float) -> Mask:
    """Rho-1's self-reference: among the lowest by loss and among the lowest by entropy."""
    return keep_top(-losses, mask, fraction) & keep_top(-entropies, mask, fraction)


def mapped(spans: NDArray[np.int64], has_loss: Mask) -> Mask:
    """Which spans hold a teacher token with a loss."""
    result = np.zeros(spans.shape[:2], dtype=bool)
    for row, position in np.ndindex(*result.shape):
        start, end = spans[row, position]
        result[row, position] = any(has_loss[row, token] for token in range(start, end))
    return result


def token_losses(hidden: Array, weight: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """Cross entropy and entropy of each token, from whole rows of logits."""
    losses, entropies = np.zeros(len(labels)), np.zeros(len(labels))
    for token, label in enumerate(labels):
        log_probabilities = _log_softmax(weight @ hidden[token])
        losses[token] = -log_probabilities[label]
        possible = log_probabilities[log_probabilities > -math.inf]
        entropies[token] = -np.sum(np.exp(possible) * possible)
    return losses, entropies


def kld(student_logits: Array, teacher_logits: Array) -> Array:
    """KL(student || teacher) of each token; a term whose first probability is 0 is 0."""
    divergences = np.zeros(len(student_logits))
    for token in range(len(student_logits)):
        student = _log_softmax(student_logits[token])
        teacher = _log_softmax(teacher_logits[token])
        for p, q in zip(student, teacher, strict=True):
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
    """Tokens of the chunks with the highest mean student minus mean teacher loss.

    A chunk without teacher losses takes the average of all of them; every chunk competes.
    """
    of_chunks = teacher_losses[(teacher_ids >= 0) & ~np.isnan(teacher_losses)]
    average = np.float32(of_chunks.mean() if len(of_chunks) else 0.0)
    means: dict[tuple[int, int], np.float32] = {}
    for row in range(len(mask)):
        for chunk in range(int(student_ids.max()) + 1):
            student = student_losses[row][(student_ids[row] == chunk) & mask[row]]
            teacher = teacher_losses[row][teacher_ids[row] == chunk]
            teacher = teacher[~np.isnan(teacher)]
            if len(student):
                of_teacher = np.float32(teacher.mean()) if len(teacher) else average
                means[row, chunk] = np.float32(student.mean()) - of_teacher
    order = sorted(means, key=lambda place: (-means[place], place))
    chosen = set(order[: _floor_of(fraction, len(order))])
    kept = np.zeros_like(mask)
    for row, position in np.argwhere(mask):
        kept[row, position] = (row, int(student_ids[row, position])) in chosen
    return kept


def chunk_ids(is_text: list[bool], num_chunks: int) -> list[int]:
    """Which chunk each place of a row lies in, counted by hand; -1 where there is no text."""
    ids = [-1] * len(is_text)
    places = [place for place, text in enumerate(is_text) if text]
    for i, place in enumerate(places):
        ids[place] = i * num_chunks // len(places)
    return ids


def _floor_of(fraction: float, count: int) -> int:
    return math.floor(Fraction(fraction).limit_denominator(10**8) * count)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())
