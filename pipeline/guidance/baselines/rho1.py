"""Rho-1: selective language modelling with a reference model of the student's own vocabulary.

`select_by_reference` keeps what the student is furthest behind the reference on: Rho-1 proper,
which keeps 60 % of the tokens for its 1B model. `select_by_self_reference` asks the reference alone
and drops what it finds hard or is unsure of: what VocAgnoLM's Table 1 calls Rho-1.

One vocabulary means that every token of the mask has a reference loss, the end of a document among
them: none is unmapped.

Source: Lin et al. (arXiv 2404.07965), as compared with in VocAgnoLM (arXiv 2503.19123).
"""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from pipeline.guidance.checks import check_finite, check_same_shape
from pipeline.guidance.selection import Selection, select_tokens
from pipeline.selection_rule import SelectionRule


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
    same labels, and the selection's guidance. Of the rule only the share and its scope are read.

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

    Both are float [rows, seq_length], nats, of the student's labels. The rule says the lowest share
    by loss and the lowest share by entropy, and their scope. Kept is what lies in both, so it is
    less: 0.49 for Rho-1's 0.7 if they had nothing in common. The selection's guidance is the
    reference loss, its threshold minus the largest loss that passes; mask, group and errors are
    those of `select_tokens`.

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
