"""The paper's baseline selections: by a reference model (Rho-1), and by equal chunks.

Source: VocAgnoLM (arXiv 2503.19123); Lin et al. (arXiv 2404.07965).
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
    """Keep the tokens with the largest excess loss over a reference model: Rho-1.

    The reference's losses of the same labels become the guidance; only the rule's share and scope
    are read. Other arguments and errors are those of `select_tokens`.

    Source: arXiv 2404.07965, section 2.2.
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
    """Keep the tokens that a reference model finds easy, both by loss and by entropy.

    VocAgnoLM's Table 1 calls this Rho-1. The rule's share is taken by least loss and by least
    entropy; tokens in both are kept. The guidance is the reference loss, the threshold minus the
    largest loss that passes. Other arguments and errors are those of `select_tokens`.

    Source: arXiv 2404.07965, self-reference.
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
    """Cut each row's text into equal chunks: token i of n is in floor(i * num_chunks / n).

    `is_text` is bool [rows, T], False at padding; ids are int64, -1 there.
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
    """Choose whole chunks of student tokens, each compared with the teacher's chunk of its number.

    Chunks compete by their mean losses; `keep_fraction` is of those with a student token that
    counts. A chunk without teacher tokens, possible in a short row, competes with the scope's mean
    teacher loss; `unmapped` isn't read. A token's guidance is its chunk's mean teacher loss.

    Arguments and errors are those of `select_tokens`; teacher losses are None if the selector
    doesn't rank by them. Chunk ids are those of the labels and of the teacher's tokens, -1 for
    none.

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
    """Average each chunk's losses, in fp64 to be independent of the device's order."""
    counted = mask & (chunk_ids >= 0)
    ids = chunk_ids.long().clamp_min(0)
    sums = torch.zeros(losses.shape[0], num_chunks, dtype=torch.float64, device=losses.device)
    counts = torch.zeros_like(sums)
    sums.scatter_add_(1, ids, torch.where(counted, losses.detach().double(), 0.0))
    counts.scatter_add_(1, ids, counted.double())
    return (sums / counts).float()
