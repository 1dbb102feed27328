"""Guidance by equal chunks instead of aligned tokens: what alignment is worth.

Both token sequences of a row are cut into the same number of equal chunks (8, 16, 32 or 64), and
chunk i of one is taken to say what chunk i of the other says. A chunk is kept or dropped as a
whole, by its mean student loss minus its mean teacher loss (selector `teacher`) or by chance
(`random`).

The paper cuts sequences of 2,048 tokens, and each chunk has tokens of both models. A chunk without
teacher tokens, which a short row can have, takes the average of all teacher token losses and
competes like any other: 40 % of the chunks are kept, whatever the number of chunks.

Source: VocAgnoLM (arXiv 2503.19123), section 2 and Table 2.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.guidance.checks import check_finite, check_same_shape
from pipeline.guidance.selection import Selection, select_tokens
from pipeline.selection_rule import PAPER_RULE, SelectionRule


def row_chunk_ids(is_text: Tensor, num_chunks: int) -> Tensor:
    """Cut the text of packed rows into equal chunks: token i of n lies in floor(i * chunks / n).

    `is_text` is bool [rows, T], False at padding: `Rows.student_is_text` or `teacher_is_text`. The
    result is int64 [rows, T], in 0..num_chunks - 1, and -1 at padding.

    Example:
        >>> row_chunk_ids(torch.arange(6)[None] < 4, 2)
        tensor([[ 0,  0,  1,  1, -1, -1]])
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be positive, got {num_chunks}")
    number = is_text.cumsum(-1) - 1
    ids = number * num_chunks // is_text.sum(-1, keepdim=True).clamp_min(1)
    return ids.masked_fill(~is_text, -1)


@torch.no_grad()
def select_chunks(
    student_losses: Tensor,
    teacher_losses: Tensor | None,
    *,
    student_chunk_ids: Tensor,
    teacher_chunk_ids: Tensor,
    num_chunks: int,
    loss_mask: Tensor,
    rule: SelectionRule = PAPER_RULE,
    group: dist.ProcessGroup | None = None,
    step: int = 0,
) -> Selection:
    """Choose whole chunks of student tokens; a token's guidance is its chunk's mean teacher loss.

    Losses, mask, group and step are those of `select_tokens`, and so are its errors; teacher losses
    are of the teacher's own tokens, float [rows, teacher_seq_length], None for selectors that don't
    rank by them. Chunk ids are those of the labels, int [rows, seq_length], and of the teacher's
    tokens, -1 for a token of no chunk, which is never kept.

    The rule is read for chunks: `keep_fraction` is of all chunks that hold a student token which
    counts. `unmapped` isn't read: a chunk without a teacher loss takes the average of the teacher's
    losses in all chunks of the scope, and competes.

    Source: Table 2.
    """
    check_same_shape(student_losses, student_chunk_ids=student_chunk_ids, loss_mask=loss_mask)
    mask = loss_mask.bool()
    check_finite({"student_losses": (student_losses, mask)}, group)
    student_means = _chunk_means(student_losses, mask, student_chunk_ids, num_chunks)
    teacher_means = None
    if teacher_losses is not None:
        teacher_losses = teacher_losses.masked_fill(teacher_chunk_ids < 0, torch.nan)
        has_loss = ~teacher_losses.isnan()
        teacher_means = _chunk_means(teacher_losses, has_loss, teacher_chunk_ids, num_chunks)
    chunks = select_tokens(
        student_means,
        teacher_means,
        loss_mask=~student_means.isnan(),
        rule=replace(rule, unmapped="mean"),
        group=group,
        teacher_losses=teacher_losses,
        step=step,
    )
    in_chunk = mask & (student_chunk_ids >= 0)

    def spread(of_chunks: Tensor) -> Tensor:
        return of_chunks.gather(1, student_chunk_ids.long().clamp_min(0))

    guidance = chunks.guidance
    if guidance is not None:
        guidance = spread(guidance).masked_fill(~in_chunk, torch.nan)
    kept, mapped = in_chunk & spread(chunks.kept), in_chunk & spread(chunks.mapped)
    return Selection(kept, mapped, mask, guidance, chunks.threshold)


def _chunk_means(losses: Tensor, mask: Tensor, chunk_ids: Tensor, num_chunks: int) -> Tensor:
    """Mean over each chunk's counted tokens, in fp64 to be independent of the device's order."""
    counted = mask & (chunk_ids >= 0)
    ids = chunk_ids.long().clamp_min(0)
    sums = torch.zeros(losses.shape[0], num_chunks, dtype=torch.float64, device=losses.device)
    counts = torch.zeros_like(sums)
    sums.scatter_add_(1, ids, torch.where(counted, losses.detach().double(), 0.0))
    counts.scatter_add_(1, ids, counted.double())
    return (sums / counts).float()
