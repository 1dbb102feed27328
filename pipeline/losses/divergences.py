"""A student's divergence from the stored part of a teacher's next-token distribution.

K entries of the teacher's distribution are known, and one more bin for the rest, the *residual*.
The student has the same K + 1 bins, its residual being all other tokens together, so the residuals'
divisions don't matter.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import TokenScores
from pipeline.losses.loss_checks import check_finite, check_same_shape
from pipeline.losses.loss_result import LossResult
from schemas.distribution_rule import EntryShape

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


@dataclass(frozen=True)
class LabelDistributions:
    """Distributions of the labels of a batch, over the student's vocabulary.

    Attributes:
        ids: int64 [rows, seq_length, K], -1 for none; the first is -1 if a label has no
            distribution.
        probs: float32 [rows, seq_length, K], their mass; the rest of 1 is the residual.
        own_ids: int64 [rows, seq_length], `own_token_ids` of the rows.
        shape: which of the K columns are exact, and which drawn.
        cells: the cells of tokens; None: each token is its own.
    """

    ids: Tensor
    probs: Tensor
    own_ids: Tensor
    shape: EntryShape
    cells: Cells | None = None

    @property
    def is_known(self) -> Tensor:
        """Which labels have a distribution, bool [rows, seq_length]."""
        return self.ids[..., 0] >= 0

    def in_cells(self, cells: Cells, before: Tensor) -> "LabelDistributions":
        """Return them over cells, `before` being the tokens before the labels, int64 [rows, S].

        What can't come after that token goes to the text's own: on average over texts that divides
        it as the teacher expects of what can come, without a quotient, so that draws stay right on
        average.
        """
        before = before.long().unsqueeze(-1).expand_as(self.ids)
        is_out = cells.on(self.ids.device).rule_out(self.ids, before)
        own_ids = self.own_ids.unsqueeze(-1)
        ids = torch.where(is_out & (own_ids >= 0), own_ids, self.ids)
        return replace(self, ids=ids, cells=cells)

    def can_teach(self, labels: Tensor) -> Tensor:
        """Return which labels have a usable distribution, bool [rows, seq_length].

        Their own token is in the label's cell. Labels are int [rows, seq_length].
        """
        if self.cells is None:
            return self.is_known
        cells = self.cells.on(labels.device)
        return self.is_known & (cells.number_of(self.own_ids) == cells.number_of(labels.long()))

    def asked_of(self, labels: Tensor) -> Tensor:
        """Return the tokens whose log-probabilities are needed, int64 [rows, seq_length, 1 + K].

        The label comes first, -1 if it has no distribution.
        """
        own = labels.long().where(self.is_known, -1)
        return torch.cat((own.unsqueeze(-1), self.ids), -1)

    def numbers_of(self, ids: Tensor) -> Tensor:
        """Return the cells of tokens, int64 [...]; -1 for none."""
        return ids if self.cells is None else self.cells.on(ids.device).number_of(ids)


@torch.no_grad()
def teacher_entropies(known: LabelDistributions) -> Tensor:
    """Return a lower bound of the entropy of each label's partly known distribution.

    A token that isn't among the K likeliest is no likelier than the last of them, nor than all such
    tokens together, p_0: the entropy is at least -sum_k p_k log p_k - p_0 log min(p_K, p_0). As one
    bin the rest would make a flat distribution look certain. The text's own token is known whatever
    its rank, so it doesn't count as the last. If the mapping to another vocabulary adds masses up,
    the result is an estimate.

    The result is fp32 [rows, seq_length], nats, of exact columns; 0 if a label has no distribution.

    Example:
        >>> ids, probs = torch.tensor([[[3, 5]]]), torch.tensor([[[0.5, 0.25]]])
        >>> teacher_entropies(LabelDistributions(ids, probs, torch.tensor([[3]]), EntryShape(2)))
        tensor([[1.0397]])
    """
    exact = known.shape.exact
    ids, probs = known.ids[..., :exact], known.probs[..., :exact].float()
    is_other = (ids >= 0) & (ids != known.own_ids.unsqueeze(-1))
    own = probs.masked_fill(is_other, 0.0).sum(-1)
    rest = (1.0 - probs.sum(-1)).clamp_min(0.0)
    least = torch.where(is_other, probs, 1.0).amin(-1).clamp_min(torch.finfo(probs.dtype).tiny)
    others = probs.where(is_other, 0.0)
    found: Tensor = torch.special.entr(others).sum(-1) + torch.special.entr(own)
    return found - torch.xlogy(rest, torch.minimum(least, rest))


def distilled_loss(
    scores: TokenScores,
    known: LabelDistributions,
    labels: Tensor,
    *,
    loss_mask: Tensor,
    weight: float,
    chosen: Tensor | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
) -> LossResult:
    """Return the loss of labels that learn a distribution, and cross entropy elsewhere.

    With P the teacher's and Q the student's probability of a cell, c the label's cell and q(label)
    the student's probability of the label itself, a label that learns a distribution has the loss

        λ D(P, Q) + (1 - λ) (-log Q(c)) - log (q(label) / Q(c))

    D is KL(P || Q) over the known cells and the residual. Which token of its cell the label is, the
    text alone says. Where each token is a cell, this is λ D + (1 - λ) cross entropy.

    Args:
        scores: the student's, [rows, seq_length], with the log-probabilities of what
            `known.asked_of(labels)` names, of its cells if there are some.
        known: what the teacher expects.
        labels: int [rows, seq_length].
        loss_mask: bool or float [rows, seq_length].
        weight: λ, 0..1.
        chosen: bool [rows, seq_length], the labels whose distribution is learned; None: all that
            have one.
        temperature: as in `distribution_divergences`.
        reverse: as there.

    Where tokens are drawn, D is the cross entropy of Q with all columns, which is linear in
    what the teacher says: its gradient is right on average. `divergence` stays the KL of the exact
    entries and the residual, without a gradient.

    Returns:
        The sum over the mask, its size, and metrics: `student_loss` over all labels,
        `student_loss_taught` and `divergence` (KL, nats) over those whose distribution is learned,
        `cell_loss`, -log Q(c) over the same, so that with exact columns alone the mean loss is
        student_loss + λ taught_fraction (divergence - cell_loss); `student_loss_untaught` over the
        others, `taught_fraction` of all; `distribution_fraction`, the share of labels with a
        distribution, `mass_held`, what its exact entries hold on average, and `crossing_fraction`,
        the share of them whose own token is in another cell: they learn by cross entropy alone.

    Raises:
        NonFiniteLossError: NaN or infinite values where the mask counts; names the row.
        ValueError: shapes disagree, λ or the temperature are impossible, or tokens are drawn and
            there is a temperature or `reverse`.

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531, section 2, for λ and the temperature.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must lie in 0..1, got {weight}: it is the λ of λ KL + (1 - λ) CE")
    if known.shape.drawn and (temperature != 1 or reverse):
        raise ValueError(
            "drawn tokens are learned by cross entropy, without temperature or reverse"
        )
    assert scores.entry_log_probs is not None
    check_same_shape(scores.losses, loss_mask=loss_mask, chosen=chosen, labels=labels)
    mask = loss_mask.bool()
    has_one, can_teach = mask & known.is_known, mask & known.can_teach(labels)
    taught = can_teach if chosen is None else can_teach & chosen
    # Elsewhere both have nothing but a residual, so the divergence is 0. To look for the places
    # that are taught, the host would wait for the device.
    silent = ~taught.unsqueeze(-1)
    student = scores.entry_log_probs.masked_fill(silent, -torch.inf).flatten(0, -2)
    label_cells, student = student[:, 0].view(taught.shape), student[:, 1:]
    teacher = known.probs.masked_fill(silent, 0.0).flatten(0, -2)
    exact = known.shape.exact
    bins = merge_cells(
        known.numbers_of(known.ids[..., :exact]).masked_fill(silent, -1).flatten(0, -2),
        student[:, :exact].detach() if known.shape.drawn else student[:, :exact],
        teacher[:, :exact],
    )
    divergences = distribution_divergences(*bins, temperature=temperature, reverse=reverse)
    divergences = divergences.view(taught.shape)
    learned = divergences
    if known.shape.drawn:
        learned = _cross_entropies(student, teacher).view(taught.shape)
    # What the label's cell costs is learned from the teacher in part.
    cell_losses = -label_cells.where(taught, 0.0)
    learned = learned - cell_losses
    check_finite({"student_losses": (scores.losses, mask), "divergences": (learned, taught)})
    losses = scores.losses.where(mask, 0.0)
    sums = {
        "student_loss": losses.sum(),
        "student_loss_taught": losses.where(taught, 0.0).sum(),
        "student_loss_untaught": losses.where(~taught, 0.0).sum(),
        "divergence": divergences.sum(),
        "cell_loss": cell_losses.sum(),
        "mass_held": known.probs[..., :exact].sum(-1).where(has_one, 0.0).sum(),
    }
    metrics = _metrics(sums, mask=mask, has_one=has_one, can_teach=can_teach, taught=taught)
    return LossResult(sums["student_loss"] + weight * learned.sum(), mask.sum(), metrics)


def merge_cells(numbers: Tensor, entry_log_probs: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the student's and the teacher's probabilities with one entry per cell.

    Numbers are int64 [n, K], -1 for none; entries of one cell have equal log-probabilities, fp32
    [n, K], with a gradient, and their probabilities, float [n, K], are added up. The result is [n,
    K] each, -inf and 0 for a repeated cell.

    Example:
        >>> merge_cells(
        ...     torch.tensor([[7, 7]]), torch.tensor([[-1.0, -1.0]]), torch.tensor([[0.25, 0.5]])
        ... )
        (tensor([[-1., -inf]]), tensor([[0.7500, 0.0000]]))
    """
    ordered, order = numbers.sort(dim=-1, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_first &= ordered >= 0
    # The sum of a cell is added up at its first entry: gradients pass nothing that comes twice.
    first = torch.where(is_first, torch.arange(numbers.shape[-1], device=order.device), 0)
    first = first.cummax(-1).values
    places = torch.arange(len(numbers), device=order.device).unsqueeze(-1).expand_as(first)
    given = probs.gather(-1, order).masked_fill(ordered < 0, 0.0)
    merged = torch.zeros_like(probs).index_put_((places, first), given, accumulate=True)
    student = entry_log_probs.gather(-1, order).masked_fill(~is_first, -torch.inf)
    return student, merged


def _metrics(
    sums: dict[str, Tensor], *, mask: Tensor, has_one: Tensor, can_teach: Tensor, taught: Tensor
) -> dict[str, Tensor]:
    counts = torch.stack((mask, has_one, can_teach, taught)).flatten(1).sum(-1)
    num_labels, num_known, num_teachable, num_taught = counts
    pairs = {
        "student_loss": (sums["student_loss"], num_labels),
        "student_loss_taught": (sums["student_loss_taught"], num_taught),
        "student_loss_untaught": (sums["student_loss_untaught"], num_labels - num_taught),
        "divergence": (sums["divergence"], num_taught),
        "cell_loss": (sums["cell_loss"], num_taught),
        "taught_fraction": (num_taught, num_labels),
        "distribution_fraction": (num_known, num_labels),
        "mass_held": (sums["mass_held"], num_known),
        "crossing_fraction": (num_known - num_teachable, num_known),
    }
    return {name: torch.stack([each.detach().double() for each in pairs[name]]) for name in pairs}


def _cross_entropies(entry_log_probs: Tensor, probs: Tensor) -> Tensor:
    """Return the cross entropy with entries over all tokens, [n]; repeated ones add up."""
    return -(probs.to(entry_log_probs.dtype) * entry_log_probs.where(probs > 0, 0.0)).sum(-1)


def _student_bins(entries: Tensor) -> Tensor:
    """Append all other tokens' log-probability to the entries', [n, K + 1]."""
    # log(1 - exp(x)) as log(-expm1(x)): exact where the entries hold nearly everything.
    mass = entries.logsumexp(-1, keepdim=True).clamp_max(_MOST_LOG_MASS)
    return torch.cat((entries, torch.log(-torch.expm1(mass))), -1)


def _teacher_bins(probs: Tensor, absent: Tensor, floor: float) -> Tensor:
    """Return the log-probabilities of the same bins; -inf for an empty one, if allowed."""
    mass = probs.sum(-1, keepdim=True)
    entries = (probs / mass.clamp_min(1.0)).clamp_min(floor).log().masked_fill(absent, _NO_BIN)
    residual = 1.0 - mass
    # Of entries that hold all of it, rounding leaves 1e-7: at a temperature of 2 that is 3e-4.
    residual = residual.where(residual >= MIN_RESIDUAL, floor).log()
    return torch.cat((entries, residual), -1)
