"""Universal logit distillation: match sorted probabilities, whatever the vocabularies.

The Wasserstein distance between two distributions over vocabularies that share no order, at a
uniform cost, is the L1 distance of their sorted probabilities, the smaller vocabulary padded with
zeros.

Sequence lengths, as in the published method: token t of a document's student tokens is compared
with token t of its teacher tokens, and the longer sequence is truncated to the shorter. Nothing
aligns the two; that is the weakness the paper points at. Student tokens beyond the shorter length
keep their cross entropy and have distance 0.
`pipeline.methods.uld` puts pairs, distances and cross entropy together.

Source: VocAgnoLM (arXiv 2503.19123), Eq. 6, λ = 0.5; Boizard et al. (arXiv 2402.12030).
"""

import torch
from torch import Tensor


def uld_losses(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Give the distance between the sorted probabilities of each pair of tokens.

    Logits are float [..., V] of either model; the result is fp32 (fp64 for fp64 inputs) [...], in
    0..2. The gradient reaches the student only. Tokens are independent: sort large vocabularies
    through `pipeline.guidance.cross_entropy.map_token_chunks`.

    Example:
        >>> uld_losses(torch.zeros(1, 2), torch.zeros(1, 4))
        tensor([1.])

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

    Given int [segments + 1], where each segment starts among either's tokens, it returns
    student_index and teacher_index, int64 [pairs], with min(student, teacher length) pairs for each
    segment.

    Example:
        >>> truncated_pairs(torch.tensor([0, 2, 5]), torch.tensor([0, 3, 4]))
        (tensor([0, 1, 2]), tensor([0, 1, 3]))
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


def _sorted_probabilities(logits: Tensor, width: int) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sorted_ones = wide.softmax(-1).sort(-1, descending=True).values
    return torch.nn.functional.pad(sorted_ones, (0, width - logits.shape[-1]))
