"""The divergence of stored distributions, held against its own formula in plain floats."""

import math
from itertools import pairwise

import pytest
import torch

from pipeline.guidance.distributions import MIN_RESIDUAL, distribution_divergences


def slow_divergence(student, teacher, temperature=1.0, reverse=False):
    """KL over entries and residual, term by term; None: no entry."""
    pairs = [(q, p) for q, p in zip(student, teacher, strict=True) if q is not None]
    mass = max(1.0, sum(p for _, p in pairs))
    bins = [(q, p / mass) for q, p in pairs]
    own = max(1 - sum(q for q, _ in bins), MIN_RESIDUAL)
    bins.append((own, max(0.0, 1 - sum(p for _, p in pairs))))
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
# rounding; entries of less than K; none at all; a teacher that is certain; an impossible entry.
CASES = [
    ([0.5, 0.2, 0.01], [0.3, 0.3, 0.2]),
    ([0.5, 0.2, 0.01], [0.5, 0.2, 0.01]),
    ([0.6, 0.3, 0.1], [0.2, 0.5, 0.3]),
    ([0.6, 0.3, 1e-9], [0.61, 0.3, 0.1]),
    ([0.4, None, None], [0.7, 0.0, 0.0]),
    ([None, None, None], [0.0, 0.0, 0.0]),
    ([0.2, 0.2, 0.2], [1.0, 0.0, 0.0]),
    ([1e-30, 0.2, 0.2], [0.5, 0.1, 1e-20]),
]


def tensors(cases=CASES, dtype=torch.float64):
    student = torch.tensor([[q or 0.0 for q in q_s] for q_s, _ in cases], dtype=dtype).log()
    return student.requires_grad_(), torch.tensor([p_s for _, p_s in cases], dtype=dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
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


@pytest.mark.parametrize(
    ("student", "options", "message"),
    [
        (torch.zeros(2, 3), {}, r"\(2, 3\) and probs \(2, 4\) must both be \[places, entries\]"),
        (torch.zeros(2, 4), {"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ],
)
def test_wrong_inputs_are_named(student, options, message):
    with pytest.raises(ValueError, match=message):
        distribution_divergences(student, torch.zeros(2, 4), **options)
