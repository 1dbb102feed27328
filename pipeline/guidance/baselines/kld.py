"""Kullback-Leibler distillation: the student imitates a teacher that has its vocabulary.

Source: VocAgnoLM (arXiv 2503.19123), Eq. 5 and appendix B.
"""

import torch
from torch import Tensor


def kld_losses(
    student_logits: Tensor, teacher_logits: Tensor, *, vocab_size: int | None = None
) -> Tensor:
    """Give KL(student || teacher) of each token's two predicted distributions.

    Logits are float [..., V] of either model; the result is fp32 (fp64 for fp64 inputs) [...],
    nats, infinite where the teacher excludes (logit -inf) a token that the student does not. The
    gradient reaches the student only. Tokens are independent, so
    `pipeline.guidance.cross_entropy.map_token_chunks` bounds the memory.

    Both models must share the tokenizer: column v means the same token in both. Columns from
    `vocab_size` on, the tokenizer's (`manifest.student.vocab_size`), are padding, of which related
    models have different numbers (Llemma 32,016 for Llama's 32,000 tokens, Qwen2.5 151,936 or
    152,064). None: both must have equally many columns, and all count.

    Source: Eq. 5.
    """
    _check_inputs(student_logits, teacher_logits, vocab_size)
    student = _log_probabilities(student_logits[..., :vocab_size])
    teacher = _log_probabilities(teacher_logits[..., :vocab_size].detach())
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


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
