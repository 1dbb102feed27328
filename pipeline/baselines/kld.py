"""Kullback-Leibler distillation: the student imitates a teacher that has its vocabulary.

Source: VocAgnoLM (arXiv 2503.19123), Eq. 5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kld_losses(
    student_logits: Tensor, teacher_logits: Tensor, *, vocab_size: int | None = None
) -> Tensor:
    """Give KL(teacher || student) of each token's predicted distribution.

    Both models must share the tokenizer: column v means the same token in both. The gradient
    reaches the student only. Tokens are independent, so `pipeline.cross_entropy.map_token_chunks`
    bounds the memory; `pipeline.baselines.distillation.distillation_loss` adds the result to the
    cross entropy.

    Args:
        student_logits: float [..., V_student].
        teacher_logits: float [..., V_teacher].
        vocab_size: columns that are tokens; later ones are padding. None: both must have equally
            many.

    Returns:
        fp32 (fp64 for fp64 inputs) [...], nats.

    Raises:
        ValueError: the vocabularies or the tokens differ.

    Example:
        >>> kld_losses(student_logits, teacher_logits).shape == student_logits.shape[:-1]
        True

    Source: Eq. 5.
    """
    student_size, teacher_size = student_logits.shape[-1], teacher_logits.shape[-1]
    if vocab_size is None and student_size != teacher_size:
        raise ValueError(
            f"kld needs one vocabulary, but the student has {student_size} and the teacher "
            f"{teacher_size} columns: give vocab_size if only the padding differs, or use uld"
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
    student = _log_probabilities(student_logits[..., :vocab_size])
    teacher = _log_probabilities(teacher_logits[..., :vocab_size].detach())
    terms = teacher.exp() * (teacher - student)
    # A token that the teacher excludes (logit -inf) adds 0, also where the student excludes it.
    return torch.where(teacher == -torch.inf, 0.0, terms).sum(-1)


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
