"""A student's divergence from the stored part of a teacher's next-token distribution.

The bins of both are K entries and the *residual*, the rest.
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

    With p the teacher's and q the student's probabilities, p_0 = 1 - sum p and q_0 = 1 - sum q,

        KL = p_0 log(p_0 / q_0) + sum_k p_k log(p_k / q_k)

    This is a lower bound of the whole vocabularies' KL, and infinite where only the student
    excludes a token.

    - `entry_log_probs`, [n, K], are log q, with a gradient, -inf for no entry.
    - `probs`, [n, K], are p, 0 for no entry; normalised if rounding made their sum exceed 1.
    - `temperature` τ acts on both sides' bins, p_k^(1/τ) / sum_j p_j^(1/τ); the factor τ² keeps the
      size of gradients.
    - `reverse` gives KL(student || teacher).
    - The student's residual counts at least `MIN_RESIDUAL`, below which fp32 can't know it; a
      smaller one of the teacher counts 0. Reversed, each teacher bin counts at least as much, so
      the result stays finite.
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
    """Distributions of a batch's labels, over the student's vocabulary.

    Attributes:
        ids: int64 [rows, seq_length, K], -1 for none; the first is -1 if a label has no
            distribution.
        probs: float32, like `ids`; the rest of 1 is the residual.
        own_ids: `own_token_ids` of the rows.
        shape: which columns are exact, and which drawn.
        cells: of tokens; None: each token is its own.
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
        """Return them over cells, given the tokens before the labels, int64 [rows, seq_length].

        The mass of tokens that can't follow goes to the text's own. On average over texts this
        renormalises without a quotient, which would bias draws.
        """
        before = before.long().unsqueeze(-1).expand_as(self.ids)
        is_out = cells.on(self.ids.device).rule_out(self.ids, before)
        own_ids = self.own_ids.unsqueeze(-1)
        ids = torch.where(is_out & (own_ids >= 0), own_ids, self.ids)
        return replace(self, ids=ids, cells=cells)

    def can_teach(self, labels: Tensor) -> Tensor:
        """Return which labels have a distribution, and their own token in their cell."""
        if self.cells is None:
            return self.is_known
        cells = self.cells.on(labels.device)
        return self.is_known & (cells.number_of(self.own_ids) == cells.number_of(labels.long()))

    def asked_of(self, labels: Tensor) -> Tensor:
        """Return each label, then its entries, int64 [rows, seq_length, 1 + K]; -1 for none."""
        own = labels.long().where(self.is_known, -1)
        return torch.cat((own.unsqueeze(-1), self.ids), -1)

    def numbers_of(self, ids: Tensor) -> Tensor:
        """Return the cells of tokens; -1 for none."""
        return ids if self.cells is None else self.cells.on(ids.device).number_of(ids)


@torch.no_grad()
def teacher_entropies(known: LabelDistributions) -> Tensor:
    """Return a lower bound of the entropy of each label's distribution, nats; 0 without one.

    Unknown tokens are no likelier than the last of the K likeliest, nor than p_0, all of them
    together: the entropy is at least -sum_k p_k log p_k - p_0 log min(p_K, p_0). The text's own
    token, known anyway, isn't that last one. Of several teachers, whose entries of one token add
    up, and where a likely token of the teacher is mapped to none, it is an estimate.
    """
    exact = known.shape.exact
    ids, probs = known.ids[..., :exact], known.probs[..., :exact].float()
    is_other = (ids >= 0) & (ids != known.own_ids.unsqueeze(-1))
    own = probs.masked_fill(is_other, 0.0).sum(-1)
    rest = (1.0 - probs.sum(-1)).clamp_min(0.0)
    flat = probs.flatten(0, -2)
    _, others = merge_cells(ids.masked_fill(~is_other, -1).flatten(0, -2), flat, flat)
    others = others.view_as(probs)
    least = torch.where(others > 0, others, 1.0).amin(-1)
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

    D is KL(P || Q) over the known cells and the residual; only the text says which token of its
    cell the label is. Without cells, this is λ D + (1 - λ) cross entropy. With draws D is the cross
    entropy of Q with all columns: linear in P, so its gradient is right on average.

    The scores hold log-probabilities of `known.asked_of(labels)`; `weight` is λ; `chosen` labels
    learn their distribution, None: all that can. For temperature and `reverse`, not possible with
    draws, see `distribution_divergences`.

    Returns:
        The sum over the mask, its size, and metrics. Of all labels: `student_loss`,
        `taught_fraction` (learn a distribution), `distribution_fraction` (have one). Of those
        taught: `student_loss_taught`, `divergence` (KL even with draws), `cell_loss` (-log Q(c));
        of the others `student_loss_untaught`. Of those with a distribution: `mass_held` (mean of
        exact entries), `crossing_fraction` (own token in another cell). Without draws the mean loss
        is student_loss + λ taught_fraction (divergence - cell_loss).

    Raises:
        NonFiniteLossError: NaN or infinite values where the mask counts.
        ValueError: shapes or options don't fit.

    Source: Hinton, Vinyals and Dean, arXiv 1503.02531, section 2: λ and temperature.
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
    # The weight of the divergence is taken from the cross entropy of the label's cell.
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
    """Add up `probs` of one cell's entries, [n, K], whose log-probabilities are equal.

    Repeated cells, and `numbers` of -1, get 0 and -inf.
    """
    ordered, order = numbers.sort(dim=-1, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_first &= ordered >= 0
    # A cell is added up at its first entry, so gradients pass no repeated one.
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
    return -(probs.to(entry_log_probs.dtype) * entry_log_probs.where(probs > 0, 0.0)).sum(-1)


def _student_bins(entries: Tensor) -> Tensor:
    """Append the residual's log-probability, [n, K + 1]."""
    # log(1 - exp(x)) as log(-expm1(x)): exact where the entries hold nearly everything.
    mass = entries.logsumexp(-1, keepdim=True).clamp_max(_MOST_LOG_MASS)
    return torch.cat((entries, torch.log(-torch.expm1(mass))), -1)


def _teacher_bins(probs: Tensor, absent: Tensor, floor: float) -> Tensor:
    """Return the log-probabilities of the same bins, at least of `floor`."""
    mass = probs.sum(-1, keepdim=True)
    entries = (probs / mass.clamp_min(1.0)).clamp_min(floor).log().masked_fill(absent, _NO_BIN)
    residual = 1.0 - mass
    # If entries hold everything, rounding leaves 1e-7, which a temperature of 2 makes 3e-4.
    residual = residual.where(residual >= MIN_RESIDUAL, floor).log()
    return torch.cat((entries, residual), -1)
