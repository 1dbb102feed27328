"""Kullback-Leibler distillation: the student imitates a teacher that has its vocabulary.

The loss is the cross entropy plus KL(student || teacher), with equal weights (`WEIGHT`).

Source: VocAgnoLM (arXiv 2503.19123), Eq. 5 and appendix B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.guidance.rule import Direction, check_choice

WEIGHT = 1.0
"""λ of Eq. 5, beside the cross entropy."""


def kld_losses(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    vocab_size: int | None = None,
    direction: Direction = "reverse",
) -> Tensor:
    """Give the divergence between each token's two predicted distributions.

    Both models must share the tokenizer: column v means the same token in both. The gradient
    reaches the student only. Tokens are independent, so
    `pipeline.guidance.cross_entropy.map_token_chunks` bounds the memory;
    `pipeline.guidance.baselines.distillation.distillation_loss` adds the result to the cross
    entropy.

    Args:
        student_logits: float [..., V_student].
        teacher_logits: float [..., V_teacher].
        vocab_size: of the tokenizer (`manifest.student.vocab_size`); later columns are padding, of
            which related models have different numbers (Llemma 32,016 for Llama's 32,000 tokens,
            Qwen2.5 151,936 or 152,064), and are disregarded. None: both must have equally many
            columns, and all count.
        direction: `reverse`: KL(student || teacher) of Eq. 5, which punishes what the teacher finds
            unlikely. `forward`: KL(teacher || student), the usual one in distillation, which
            punishes what the student misses.

    Returns:
        fp32 (fp64 for fp64 inputs) [...], nats. Infinite where the second distribution excludes
        (logit -inf) a token that the first does not.

    Raises:
        ValueError: the vocabularies or the tokens differ, or the direction is unknown.

    Example:
        >>> kld_losses(student_logits, teacher_logits, vocab_size=32_000)

    Source: Eq. 5.
    """
    check_choice("direction", direction, Direction)
    _check_inputs(student_logits, teacher_logits, vocab_size)
    student = _log_probabilities(student_logits[..., :vocab_size])
    teacher = _log_probabilities(teacher_logits[..., :vocab_size].detach())
    first, second = (student, teacher) if direction == "reverse" else (teacher, student)
    # A token that the first excludes adds 0, also where the second does. It leaves before the
    # product: a derivative of 0 * -inf would be NaN even where its value is replaced.
    excluded = first == -torch.inf
    difference = first.masked_fill(excluded, 0.0) - second.masked_fill(excluded, 0.0)
    return (first.exp() * difference).sum(-1)


def _check_inputs(student_logits: Tensor, teacher_logits: Tensor, vocab_size: int | None) -> None:
    student_size, teacher_size = student_logits.shape[-1], teacher_logits.shape[-1]
    if vocab_size is None and student_size != teacher_size:
        raise ValueError(
            f"kld needs one vocabulary, but the student has {student_size} and the teacher "
            f"{teacher_size} columns: give vocab_size, the tokenizer's, if only the padding "
            "differs, or use uld"
        )
    if vocab_size is not None and not 1 <= vocab_size <= min(student_size, teacher_size):
        raise ValueError(
            f"vocab_size {vocab_size} must lie in 1..{min(student_size, teacher_size)}, the "
            "columns that both models have"
        )
    if student_logits.shape[:-1] != teacher_logits.shape[:-1]:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits "
            f"{tuple(teacher_logits.shape)} must be of the same tokens"
        )


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
