"""How far a student's next-token distribution is from the part of a teacher's that was stored.

Of the teacher's distribution K entries are known, and what they leave over: one more bin, the
*residual*. The student has the same K + 1 bins, its residual being all other tokens together, so
nothing is said about how either divides it.
"""

import math

import torch
from torch import Tensor

from pipeline.guidance.checks import check_finite, check_same_shape
from pipeline.guidance.cross_entropy import TokenScores
from pipeline.guidance.loss import LossResult

MIN_RESIDUAL = 2.0**-20
"""Least mass of a residual, and of a teacher's bin if the divergence is reversed."""
_MOST_LOG_MASS = math.log1p(-MIN_RESIDUAL)
# Log-probability of a bin that doesn't exist; finite, so that no gradient of it is NaN.
_NO_BIN = -1e4


def distribution_divergences(
    entry_log_probs: Tensor, probs: Tensor, *, temperature: float = 1.0, reverse: bool = False
) -> Tensor:
    """Return KL(teacher || student) of each place over K entries and the residual, [n], nats.

    `entry_log_probs`, fp32 or fp64 [n, K], are log q, nats, with a gradient, -inf for no entry;
    `probs`, float [n, K], are p, 0 for no entry, and get none. With p the teacher's and q the
    student's probabilities of the entries, and p_0 = 1 - sum p, q_0 = 1 - sum q,

        KL = p_0 log(p_0 / q_0) + sum_k p_k log(p_k / q_k)

    Merging tokens into one bin never raises a divergence: this is a lower bound of the whole
    vocabularies' KL, and equal to it if the residual is empty. It is infinite where the student
    excludes (log-probability -inf) what the teacher doesn't.

    - `temperature` τ acts on the bins of both sides, p_k^(1/τ) / sum_j p_j^(1/τ), and the result
      is multiplied by τ², so that gradients keep their size (Hinton).
    - `reverse` gives KL(student || teacher) of the same bins.
    - Entries whose mass exceeds 1, by the rounding of stored log-probabilities, are divided by it;
      their residual is 0. 0 log 0 = 0.
    - The student's residual counts at least `MIN_RESIDUAL` (2^-20), below which fp32 can't know it;
      its gradient is 0 there. The teacher's counts 0 there. Reversed, each of the teacher's bins
      counts at least as much, for the divergence from an impossible token would be infinite.

    Example:
        >>> log_probs = torch.tensor([[0.5, 0.25]]).log()
        >>> distribution_divergences(log_probs, torch.tensor([[0.5, 0.5]]))
        tensor([0.3466])

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531, section 2 (temperature).
    """
    if entry_log_probs.shape != probs.shape or probs.dim() != 2:
        raise ValueError(
            f"entry_log_probs {tuple(entry_log_probs.shape)} and probs {tuple(probs.shape)} must "
            "both be [places, entries]"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    absent = (entry_log_probs == -torch.inf) & (probs <= 0)
    student = _student_bins(entry_log_probs.masked_fill(absent, _NO_BIN))
    floor = MIN_RESIDUAL if reverse else 0.0
    teacher = _teacher_bins(probs.detach().to(student.dtype), absent, floor)
    if temperature != 1:
        exists = torch.nn.functional.pad(~absent, (0, 1), value=True)
        student = (student / temperature).where(exists, _NO_BIN).log_softmax(-1)
        teacher = (teacher / temperature).where(exists, _NO_BIN).log_softmax(-1)
    if reverse:
        return temperature**2 * (student.exp() * (student - teacher)).sum(-1)
    # Where p is 0 its logarithm is -inf: the product would be NaN.
    has_mass = teacher > -torch.inf
    difference = torch.where(has_mass, teacher, 0.0) - torch.where(has_mass, student, 0.0)
    return temperature**2 * (teacher.exp() * difference).sum(-1)


@torch.no_grad()
def teacher_entropies(
    entry_ids: Tensor, probs: Tensor, labels: Tensor, *, draws: int = 0
) -> Tensor:
    """Return the least entropy of each label's whole distribution, of which a part is known.

    A token that isn't among the K likeliest is no likelier than the last of them, nor than all of
    these together, p_0: the entropy is at least -sum_k p_k log p_k - p_0 log min(p_K, p_0). As one
    bin the rest would make a flat distribution look certain. The label's own mass is known whatever
    its rank, so it isn't taken for the last. Where the mapping to another vocabulary adds masses
    up, the result is an estimate.

    Ids and masses are as in `distilled_loss`, of which the last `draws` aren't read; labels are int
    [rows, seq_length], and so is the result, fp32, nats; 0 if a label has no distribution.

    Example:
        >>> ids, probs = torch.tensor([[[3, 5]]]), torch.tensor([[[0.5, 0.25]]])
        >>> teacher_entropies(ids, probs, torch.tensor([[3]]))
        tensor([[1.0397]])
    """
    exact = probs.shape[-1] - draws
    ids, probs = entry_ids[..., :exact], probs[..., :exact].float()
    is_other = (ids >= 0) & (ids != labels.unsqueeze(-1))
    rest = (1.0 - probs.sum(-1)).clamp_min(0.0)
    least = torch.where(is_other, probs, 1.0).amin(-1).clamp_min(torch.finfo(probs.dtype).tiny)
    known: Tensor = torch.special.entr(probs).sum(-1)
    return known - torch.xlogy(rest, torch.minimum(least, rest))


def distilled_loss(
    scores: TokenScores,
    entry_ids: Tensor,
    probs: Tensor,
    *,
    moved: Tensor,
    loss_mask: Tensor,
    weight: float,
    chosen: Tensor | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
    draws: int = 0,
) -> LossResult:
    """Return λ KL + (1 - λ) cross entropy where a distribution is learned, cross entropy elsewhere.

    Args:
        scores: the student's, [rows, seq_length], with the log-probabilities of `entry_ids`.
        entry_ids: int [rows, seq_length, K], -1 behind the last and alone if a label has no
            distribution.
        probs: float [rows, seq_length, K], the teacher's.
        moved: float [rows, seq_length], `moved_mass` of the rows.
        loss_mask: bool or float [rows, seq_length].
        weight: λ, 0..1.
        chosen: bool [rows, seq_length], the labels whose distribution is learned; None: all that
            have one.
        temperature: as in `distribution_divergences`.
        reverse: as there.
        draws: how many of the K entries, the last, are draws of the rest (see
            `pipeline.distributions.mapping`). The cross entropy with entries and draws over all of
            the student's tokens then takes the place of the KL: its gradient, the student's
            distribution less the teacher's, is right on average. `divergence` stays the KL of
            the other entries and the residual, without a gradient.

    Returns:
        The sum over the mask, its size, and metrics: `student_loss` over all labels,
        `student_loss_taught` and `divergence` (KL, nats) over those whose distribution is learned,
        `student_loss_untaught` over the others, `taught_fraction` of all; `distribution_fraction`,
        the share of labels with a distribution, and `mass_held`, what its entries hold on average;
        over the labels whose distribution is learned `contradicted_fraction`, the share at which
        the text's own token by its bytes alone would count for a token other than the label, and
        `mass_moved`, the mass that is the label's instead, averaged over all of them.

    Raises:
        NonFiniteLossError: NaN or infinite values where the mask counts; names the row.
        ValueError: shapes disagree, λ or the temperature are impossible, or there are draws and a
            temperature or `reverse`.

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531, section 2.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must lie in 0..1, got {weight}: it is the λ of λ KL + (1 - λ) CE")
    if draws and (temperature != 1 or reverse):
        raise ValueError("draws are learned by cross entropy, without temperature or reverse")
    assert scores.entry_log_probs is not None
    check_same_shape(scores.losses, loss_mask=loss_mask, chosen=chosen, probs=probs[..., 0])
    mask = loss_mask.bool()
    known = mask & (entry_ids[..., 0] >= 0)
    taught = known if chosen is None else known & chosen
    # Elsewhere both have nothing but a residual, so the divergence is 0. To look for the places
    # that are taught, the host would wait for the device.
    silent = ~taught.unsqueeze(-1)
    student = scores.entry_log_probs.masked_fill(silent, -torch.inf).flatten(0, -2)
    teacher = probs.masked_fill(silent, 0.0).flatten(0, -2)
    num_exact = probs.shape[-1] - draws
    divergences = distribution_divergences(
        student[:, :num_exact].detach() if draws else student,
        teacher[:, :num_exact],
        temperature=temperature,
        reverse=reverse,
    ).view(taught.shape)
    learned = divergences
    if draws:
        learned = _cross_entropies(student, teacher).view(taught.shape)
    check_finite({"student_losses": (scores.losses, mask), "divergences": (learned, taught)})
    taught_loss = torch.where(taught, scores.losses, 0.0).sum()
    untaught_loss = torch.where(mask & ~taught, scores.losses, 0.0).sum()
    held = torch.where(known, probs[..., :num_exact].sum(-1), 0.0)
    sums = taught_loss, untaught_loss, divergences.sum(), held.sum()
    metrics = _metrics(sums, (mask, known, taught), torch.where(taught, moved, 0.0))
    loss_sum = weight * learned.sum() + (1 - weight) * taught_loss + untaught_loss
    return LossResult(loss_sum, mask.sum(), metrics)


def _metrics(
    sums: tuple[Tensor, Tensor, Tensor, Tensor], labels: tuple[Tensor, ...], gained: Tensor
) -> dict[str, Tensor]:
    """Return what `distilled_loss` says of them, all tensors but sums being [rows, seq_length].

    Sums are losses of taught labels and of the others, divergences, and mass of the entries; labels
    are bool: all, those with a distribution, and the taught ones. The mass that was moved to taught
    labels is float.
    """
    taught_loss, untaught_loss, divergence, held = sums
    counts = torch.stack((*labels, gained > 0)).flatten(1).sum(-1)
    num_labels, num_known, num_taught, num_contradicted = counts
    pairs = {
        "student_loss": (taught_loss + untaught_loss, num_labels),
        "student_loss_taught": (taught_loss, num_taught),
        "student_loss_untaught": (untaught_loss, num_labels - num_taught),
        "divergence": (divergence, num_taught),
        "taught_fraction": (num_taught, num_labels),
        "distribution_fraction": (num_known, num_labels),
        "mass_held": (held, num_known),
        "contradicted_fraction": (num_contradicted, num_taught),
        "mass_moved": (gained.sum(), num_taught),
    }
    return {name: torch.stack([each.detach().double() for each in pairs[name]]) for name in pairs}


def _cross_entropies(entry_log_probs: Tensor, probs: Tensor) -> Tensor:
    """Return the cross entropy with entries over all tokens, [n]; one named twice counts twice."""
    return -(probs.to(entry_log_probs.dtype) * entry_log_probs.where(probs > 0, 0.0)).sum(-1)


def _student_bins(entries: Tensor) -> Tensor:
    """Append the log-probability of all other tokens to that of the entries, [n, K + 1]."""
    # log(1 - exp(x)) as log(-expm1(x)): exact where the entries hold nearly everything.
    mass = entries.logsumexp(-1, keepdim=True).clamp_max(_MOST_LOG_MASS)
    return torch.cat((entries, torch.log(-torch.expm1(mass))), -1)


def _teacher_bins(probs: Tensor, absent: Tensor, floor: float) -> Tensor:
    """Return the log-probabilities of the same bins; -inf where one is empty and may be."""
    mass = probs.sum(-1, keepdim=True)
    entries = (probs / mass.clamp_min(1.0)).clamp_min(floor).log().masked_fill(absent, _NO_BIN)
    residual = 1.0 - mass
    # Of entries that hold all of it, rounding leaves 1e-7: at a temperature of 2 that is 3e-4.
    residual = residual.where(residual >= MIN_RESIDUAL, floor).log()
    return torch.cat((entries, residual), -1)
