"""The divergence of stored distributions, held against its own formula in plain floats."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.divergences import (
    MIN_RESIDUAL,
    LabelDistributions,
    distilled_loss,
    distribution_divergences,
    teacher_entropies,
)
from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.losses.loss_result import metric_values
from schemas.distribution_rule import EntryShape
from schemas.stored_distributions import least_entropies


def slow_divergence(student, teacher, temperature=1.0, reverse=False):
    """KL over entries and residual, term by term; None: no entry."""
    pairs = [(q, p) for q, p in zip(student, teacher, strict=True) if q is not None]
    mass = max(1.0, sum(p for _, p in pairs))
    bins = [(q, p / mass) for q, p in pairs]
    own = max(1 - sum(q for q, _ in bins), MIN_RESIDUAL)
    rest = 1 - sum(p for _, p in pairs)
    bins.append((own, rest if rest >= MIN_RESIDUAL else 0.0))
    if reverse:
        bins = [(q, max(p, MIN_RESIDUAL)) for q, p in bins]
    if temperature != 1:
        roots = [(q ** (1 / temperature), p ** (1 / temperature)) for q, p in bins]
        sums = [sum(side) for side in zip(*roots, strict=True)]
        bins = [(q / sums[0], p / sums[1]) for q, p in roots]
    if reverse:
        bins = [(p, q) for q, p in bins]
    return temperature**2 * sum(p * math.log(p / q) for q, p in bins if p > 0)


# Student, teacher: with a rest on both sides; equal; the whole mass; a little more than it by
# rounding; entries of less than K; none at all; a teacher that is certain; an impossible entry;
# the whole mass but for rounding.
CASES = [
    ([0.5, 0.2, 0.01], [0.3, 0.3, 0.2]),
    ([0.5, 0.2, 0.01], [0.5, 0.2, 0.01]),
    ([0.6, 0.3, 0.1], [0.2, 0.5, 0.3]),
    ([0.6, 0.3, 1e-9], [0.61, 0.3, 0.1]),
    ([0.4, None, None], [0.7, 0.0, 0.0]),
    ([None, None, None], [0.0, 0.0, 0.0]),
    ([0.2, 0.2, 0.2], [1.0, 0.0, 0.0]),
    ([1e-30, 0.2, 0.2], [0.5, 0.1, 1e-20]),
    ([0.2, 0.2, 0.2], [0.7, 0.2, 0.0999999]),
]


def tensors(cases=CASES, dtype=torch.float64):
    student = torch.tensor([[q or 0.0 for q in q_s] for q_s, _ in cases], dtype=dtype).log()
    return student.requires_grad_(), torch.tensor([p_s for _, p_s in cases], dtype=dtype)


@pytest.mark.parametrize(
    ("temperature", "dtype", "rel"),
    [
        *((each, torch.float64, 1e-9) for each in (1.0, 0.5, 4.0)),
        *((each, torch.float32, 1e-3) for each in (1.0, 0.5, 4.0)),
        (5e4, torch.float64, 1e-4),  # absent entries stay out; τ² magnifies rounding
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_divergences_are_those_of_the_formula(temperature, reverse, dtype, rel):
    student, teacher = tensors(dtype=dtype)
    found = distribution_divergences(student, teacher, temperature=temperature, reverse=reverse)
    expected = [slow_divergence(q_s, p_s, temperature, reverse) for q_s, p_s in CASES]
    assert found.tolist() == pytest.approx(expected, rel=rel, abs=1e-5)
    assert found.dtype == dtype
    assert [value > 0.01 for value in expected] == [n not in (1, 5) for n in range(len(CASES))]
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.isfinite().all()
    absent = student == -torch.inf
    assert not gradient[absent].any()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_those_of_the_whole_vocabulary_with_its_rest_merged(temperature, reverse):
    """Seven tokens, four of them entries: one step down the divergence's gradient lowers it."""
    torch.manual_seed(0)
    logits = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(6, 7, dtype=torch.float64).softmax(-1)[:, :4]

    def divergences(logits):
        return distribution_divergences(
            logits.log_softmax(-1)[:, :4], probs, temperature=temperature, reverse=reverse
        )

    assert torch.autograd.gradcheck(divergences, (logits,))
    assert (divergences(logits) > 0).all()


def test_fewer_bins_never_diverge_more_and_all_are_the_full_divergence():
    torch.manual_seed(0)
    student = torch.randn(50, 9, dtype=torch.float64).log_softmax(-1)
    teacher = torch.randn(50, 9, dtype=torch.float64).softmax(-1)
    whole = (teacher * (teacher.log() - student)).sum(-1)
    by_count = [distribution_divergences(student[:, :k], teacher[:, :k]) for k in range(10)]
    torch.testing.assert_close(by_count[9], whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(by_count[8], whole)
    for fewer, more in pairwise(by_count[:9]):
        assert (fewer <= more + 1e-12).all()


def test_a_token_that_only_the_student_excludes_is_infinitely_far():
    student, teacher = torch.tensor([[0.0, 1.0]]).log(), torch.tensor([[0.5, 0.5]])
    assert distribution_divergences(student, teacher).tolist() == [math.inf]


def make_rows(seed=0):
    """Two rows of six labels, a vocabulary of nine, three entries; some labels have none."""
    torch.manual_seed(seed)
    hidden, weight = torch.randn(2, 6, 4).double(), torch.randn(9, 4).double().requires_grad_()
    labels, mask = torch.randint(9, (2, 6)), torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1]])
    entry_ids = torch.stack([torch.randperm(9)[:3] for _ in range(12)]).view(2, 6, 3)
    probs = torch.rand(2, 6, 3).double().softmax(-1) * 0.9
    entry_ids[0, 1], entry_ids[1, 4, 2] = -1, -1
    return hidden, weight, labels, mask.float(), entry_ids, probs.where(entry_ids >= 0, 0.0)


CELLS = [0, 1, 1, 3, 4, 3, 3, 7, 7]  # of nine tokens


def known_of(labels, entry_ids, probs, cells=None):
    """The rows' distributions; a label's own token is itself, or another."""
    own_ids = (labels + torch.arange(6) % 3 // 2 * 5) % 9
    numbers = None if cells is None else Cells.of(np.array(cells))
    return LabelDistributions(entry_ids, probs, own_ids, EntryShape(3), numbers)


def score(hidden, layer, labels, mask, known):
    return linear_cross_entropy(
        hidden,
        layer,
        labels,
        loss_mask=mask,
        entry_ids=known.asked_of(labels),
        cells=known.cells,
    )


@pytest.mark.parametrize("weight", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("chosen", [None, torch.arange(12).view(2, 6) % 3 > 0])
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "reverse": True}])
@pytest.mark.parametrize("cells", [None, CELLS])
def test_labels_are_taught_by_both_parts_where_there_is_a_distribution(
    weight, chosen, options, cells
):
    hidden, layer, labels, mask, entry_ids, probs = make_rows()
    known = known_of(labels, entry_ids, probs, cells)
    scores = score(hidden, layer, labels, mask, known)
    result = distilled_loss(
        scores, known, labels, loss_mask=mask, weight=weight, chosen=chosen, **options
    )
    numbers = list(range(9)) if cells is None else cells
    q = (hidden @ layer.detach().T).softmax(-1)
    parts = {"taught": [], "untaught": [], "divergence": []}
    within, num_crossing, cell_loss = 0.0, 0, 0.0
    for row, place in mask.nonzero().tolist():
        of_cell = {n: sum(q[row, place, t].item() for t in range(9) if numbers[t] == n)
                   for n in numbers}  # fmt: skip
        label = int(labels[row, place])
        loss, own = -math.log(q[row, place, label]), of_cell[numbers[label]]
        has_one = entry_ids[row, place] >= 0
        crossing = cells is not None and (numbers[int(known.own_ids[row, place])] != numbers[label])
        num_crossing += bool(has_one.any()) and crossing
        if has_one.any() and not crossing and (chosen is None or chosen[row, place]):
            merged = {}
            for token, p in zip(entry_ids[row, place], probs[row, place], strict=True):
                if token >= 0:
                    merged[numbers[token]] = merged.get(numbers[token], 0.0) + p.item()
            kl = slow_divergence(
                [of_cell[number] for number in merged],
                list(merged.values()),
                options.get("temperature", 1.0),
                options.get("reverse", False),
            )
            parts["divergence"].append(kl)
            parts["taught"].append(loss)
            cell_loss -= math.log(own)
            within += (
                weight * kl + (1 - weight) * -math.log(own) - math.log(q[row, place, label] / own)
            )
        else:
            parts["untaught"].append(loss)
    taught, untaught, divergence = (
        sum(parts[name]) for name in ("taught", "untaught", "divergence")
    )
    assert result.loss_sum.item() == pytest.approx(within + untaught)
    if cells is None:
        assert within == pytest.approx(weight * divergence + (1 - weight) * taught)
    assert int(result.num_tokens) == 10
    told = metric_values(result.metrics)
    num_taught = len(parts["taught"])
    assert told == pytest.approx({
        "student_loss": (taught + untaught) / 10,
        "student_loss_taught": taught / num_taught,
        "student_loss_untaught": untaught / (10 - num_taught),
        "divergence": divergence / num_taught,
        "cell_loss": cell_loss / num_taught,
        "taught_fraction": num_taught / 10,
        "distribution_fraction": 0.9,
        "mass_held": float((probs * mask[..., None]).sum() / 9),
        "crossing_fraction": num_crossing / 9,
    })  # fmt: skip
    if cells is None:
        assert num_taught == (9 if chosen is None else 5)
    else:
        assert num_crossing > 0 < num_taught
    (gradient,) = torch.autograd.grad(result.loss_sum, layer)
    assert gradient.abs().sum() > 0


def test_a_batch_without_distributions_is_learned_by_cross_entropy():
    hidden, layer, labels, mask, entry_ids, probs = make_rows()
    known = known_of(labels, torch.full_like(entry_ids, -1), 0 * probs, CELLS)
    scores = score(hidden, layer, labels, mask, known)
    result = distilled_loss(scores, known, labels, loss_mask=mask, weight=0.8)
    assert result.loss_sum.item() == pytest.approx(scores.losses.sum().item())
    assert math.isnan(metric_values(result.metrics)["divergence"])
    found = torch.autograd.grad(result.loss_sum, layer, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(scores.losses.sum(), layer))


def test_broken_divergences_and_impossible_weights_are_refused():
    hidden, layer, labels, mask, entry_ids, probs = make_rows()
    known = known_of(labels, entry_ids, probs)
    scores = score(hidden, layer, labels, mask, known)
    with pytest.raises(ValueError, match=r"weight must lie in 0\.\.1, got 1\.5"):
        distilled_loss(scores, known, labels, loss_mask=mask, weight=1.5)
    probs[1, 3, 0] = torch.nan
    with pytest.raises(NonFiniteLossError, match=r"divergences\[1, 3\] is nan"):
        distilled_loss(scores, known, labels, loss_mask=mask, weight=0.8)


@pytest.mark.parametrize(
    ("student", "options", "message"),
    [
        (torch.zeros(2, 3), {}, r"\(2, 3\) and probs \(2, 4\) must both be \[places, entries\]"),
        (
            torch.zeros(2, 4),
            {"temperature": 0.0},
            "temperature must be positive and finite, got 0.0",
        ),
    ],
)
def test_wrong_inputs_are_named(student, options, message):
    with pytest.raises(ValueError, match=message):
        distribution_divergences(student, torch.zeros(2, 4), **options)


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=9),
    st.integers(1, 9),
    st.integers(0, 8),
    st.booleans(),
)
def test_a_known_part_bounds_the_entropy_from_below(weights, top_k, label, label_is_entry):
    """Whatever the rest is, and next to one bin for it; exact where the rest is even."""
    masses = np.array(weights) / sum(weights)
    order = np.argsort(-masses, kind="stable")[: min(top_k, len(masses))].tolist()
    label %= len(masses)
    if label_is_entry and label not in order:
        order.append(label)
    draws = [[order[0], -1]]
    ids = torch.tensor([[[*order, -1] + draws[0]]])
    probs = torch.tensor([[[*masses[order], 0.0, 0.5, 0.0]]])
    known = LabelDistributions(
        ids, probs, torch.tensor([[label]]), EntryShape(ids.shape[-1] - 2, 2)
    )
    found = teacher_entropies(known).item()
    whole = -float(np.sum(masses * np.log(masses)))
    if label != order[-1]:  # as `vocag score --entropy-above` judges it
        assert found == pytest.approx(least_entropies(np.log(masses[None, order]))[0], abs=1e-4)
    bins = np.append(masses[order], max(0.0, 1 - masses[order].sum()))
    one_bin = -float(np.sum(bins * np.log(np.maximum(bins, 1e-12))))
    assert one_bin - 1e-4 <= found <= whole + 1e-4
    if len(order) == len(masses) or (len(set(weights)) == 1 and order != [label]):
        assert found == pytest.approx(whole, abs=1e-4)


def test_a_token_of_several_teachers_counts_once():
    """Two that agree have the entropy of one, and others that of their mean."""
    own = torch.tensor([[3]])
    for rows, masses in (
        ([(7, 0.9), (3, 0.1), (-1, 0.0)], [0.9, 0.1]),
        ([(7, 0.45), (3, 0.05), (-1, 0.0), (7, 0.45), (3, 0.05), (-1, 0.0)], [0.9, 0.1]),
        ([(7, 0.3), (8, 0.15), (3, 0.05), (8, 0.4), (3, 0.1), (-1, 0.0)], [0.3, 0.55, 0.15]),
    ):
        ids, probs = zip(*rows, strict=True)
        known = torch.tensor([[ids]]), torch.tensor([[probs]]), own, EntryShape(len(ids))
        expected = -sum(p * math.log(p) for p in masses)
        assert teacher_entropies(LabelDistributions(*known)).item() == pytest.approx(expected)


def test_no_distribution_has_no_entropy():
    own = torch.tensor([[0]])
    ids, probs = torch.tensor([[[-1, -1]]]), torch.zeros(1, 1, 2)
    assert teacher_entropies(LabelDistributions(ids, probs, own, EntryShape(2))).item() == 0
    ids, probs = torch.tensor([[[1, 2]]]), torch.tensor([[[1.0, 0.0]]])
    found = teacher_entropies(LabelDistributions(ids, probs, own, EntryShape(2)))
    assert found.item() == pytest.approx(0, abs=1e-6)
