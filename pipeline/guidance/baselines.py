"""The paper's baseline selections: by a reference model (Rho-1), and by equal chunks.

`select_by_reference` is Rho-1 proper, which keeps 60 % of the tokens for its 1B model;
`select_by_self_reference` is what VocAgnoLM's Table 1 calls Rho-1. With one vocabulary every token
of the mask has a reference loss, including the end of a document: none is unmapped.

`select_chunks` shows the worth of alignment. Both token sequences of a row are cut into the same
number of equal chunks (8, 16, 32 or 64), and chunk i of one is matched with chunk i of the other. A
chunk is kept or dropped as a whole, by its mean student loss minus its mean teacher loss (selector
`teacher`) or by chance (`random`). In the paper's sequences of 2,048 tokens each chunk has tokens
of both models. A chunk without teacher tokens, possible in a short row, takes the average of all
teacher token losses and competes: 40 % of the chunks are kept, whatever their number.

Source: VocAgnoLM (arXiv 2503.19123), section 2, Tables 1 and 2; Lin et al. (arXiv 2404.07965).
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.guidance.selection import Selection, select_tokens
from pipeline.losses.loss_checks import check_finite, check_same_shape
from pipeline.selection_rule import PAPER_RULE, SelectionRule


def select_by_reference(
    student_losses: Tensor,
    reference_losses: Tensor,
    *,
    loss_mask: Tensor,
    rule: SelectionRule,
    group: dist.ProcessGroup | None = None,
) -> Selection:
    """Keep the tokens on which the student is furthest behind the reference model.

    Losses, mask, group and errors are those of `select_tokens`; the reference's losses are of the
    same labels, and the selection's guidance. Only the rule's share and scope are read.

    Source: arXiv 2404.07965, section 2.2: the excess loss.
    """
    check_same_shape(student_losses, reference_losses=reference_losses, loss_mask=loss_mask)
    check_finite({"reference_losses": (reference_losses, loss_mask.bool())}, group)
    own = replace(rule, selector="teacher", unmapped="exclude")
    return select_tokens(
        student_losses, reference_losses, loss_mask=loss_mask, rule=own, group=group
    )


def select_by_self_reference(
    reference_losses: Tensor,
    reference_entropies: Tensor,
    *,
    loss_mask: Tensor,
    rule: SelectionRule,
    group: dist.ProcessGroup | None = None,
) -> Selection:
    """Keep the tokens that are easy for the reference model by its loss and by its entropy.

    Both are float [rows, seq_length], nats, of the student's labels. The rule gives the lowest
    share by loss and by entropy, and their scope. Tokens in both are kept, so fewer: 0.49 for
    Rho-1's 0.7 if they were independent. The selection's guidance is the reference loss, its
    threshold minus the largest loss that passes; mask, group and errors are those of
    `select_tokens`.

    Source: arXiv 2404.07965, self-reference with the intersection of loss and entropy.
    """
    check_same_shape(reference_losses, reference_entropies=reference_entropies, loss_mask=loss_mask)
    mask = loss_mask.bool()
    values = {"reference_losses": reference_losses, "reference_entropies": reference_entropies}
    check_finite({name: (each, mask) for name, each in values.items()}, group)
    own = replace(rule, selector="teacher_loss", unmapped="exclude")
    by_loss, by_entropy = (
        select_tokens(zeroed, zeroed, loss_mask=mask, rule=own, group=group)
        for zeroed in (each.masked_fill(~mask, 0.0) for each in values.values())
    )
    return replace(by_loss, kept=by_loss.kept & by_entropy.kept, mapped=mask)


def row_chunk_ids(is_text: Tensor, num_chunks: int) -> Tensor:
    """Cut the text of packed rows into equal chunks: token i of n is in floor(i * chunks / n).

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

    Losses, mask, group, step and errors are those of `select_tokens`; teacher losses are of the
    teacher's own tokens, float [rows, teacher_seq_length], None for selectors that don't rank by
    them. Chunk ids are those of the labels, int [rows, seq_length], and of the teacher's tokens, -1
    for a token of no chunk, which is never kept.

    The rule applies to chunks: `keep_fraction` is of all chunks with a student token that counts.
    `unmapped` isn't read: a chunk without a teacher loss takes the average of the teacher's losses
    in all chunks of the scope, and competes.

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
