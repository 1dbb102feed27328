"""Approximate Likelihood Matching against a slow count over byte boundaries."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from pipeline.losses.likelihood_matching import TEMPERATURE, likelihood_divergences
from pipeline.losses.loss_checks import NonFiniteLossError
from tests.support.reference import reference_spans

Cuts = list[int]


def _tokens(rng: random.Random, num_bytes: int) -> Cuts:
    """Return the byte boundaries of a random tokenization, both ends included."""
    inner = rng.sample(range(1, num_bytes), rng.randrange(num_bytes // 2, num_bytes - 1))
    return [0, *sorted(inner), num_bytes]


def divergences(student: Tensor, teacher: Tensor, spans: Tensor) -> Tensor:
    """Where every token counts and every teacher token has a loss."""
    mask, has_loss = torch.ones_like(student), torch.ones_like(teacher, dtype=torch.bool)
    return likelihood_divergences(
        student, teacher, spans, loss_mask=mask, teacher_loss_mask=has_loss
    )


class Case:
    """A row of two documents, each tokenized at random by both sides, and its losses."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        spans, self.chunks = [], []
        num_student = num_teacher = 0
        for num_bytes in (rng.randrange(4, 30), rng.randrange(4, 30)):
            student, teacher = _tokens(rng, num_bytes), _tokens(rng, num_bytes)
            # Before a document's tokens comes the teacher's context token, without a loss.
            num_teacher += 1
            sides = (list(itertools.pairwise(cuts)) for cuts in (student, teacher))
            spans += [[n + num_teacher for n in span or ()] for span in reference_spans(*sides)]
            shared = sorted({*student} & {*teacher})
            for a, b in itertools.pairwise(shared):
                own = range(num_student + student.index(a), num_student + student.index(b))
                other = range(num_teacher + teacher.index(a), num_teacher + teacher.index(b))
                self.chunks.append((own, other))
            num_student += len(student) - 1
            num_teacher += len(teacher) - 1
            spans.append([0, 0])  # the end of the document, unmapped
            num_student += 1
        generator = torch.Generator().manual_seed(seed)
        self.spans = torch.tensor([spans])
        self.student = 4 * torch.rand(1, num_student, generator=generator, dtype=torch.float64)
        self.teacher = 4 * torch.rand(1, num_teacher, generator=generator, dtype=torch.float64)
        self.mask = torch.ones(1, num_student)
        self.has_loss = torch.ones(1, num_teacher, dtype=torch.bool)

    def divergences(self, student: Tensor, temperature: float = TEMPERATURE) -> Tensor:
        return likelihood_divergences(
            student,
            self.teacher,
            self.spans,
            loss_mask=self.mask,
            teacher_loss_mask=self.has_loss,
            temperature=temperature,
        )


def _of_coins(student: float, teacher: float, temperature: float) -> float:
    p, q = math.exp(-teacher / temperature), math.exp(-student / temperature)
    return temperature * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))


def _slow(case: Case, temperature: float) -> list[float]:
    expected = [0.0] * case.student.shape[1]
    for own, other in case.chunks:
        learned = all(case.mask[0, place] for place in own)
        if learned and all(case.has_loss[0, place] for place in other):
            losses = math.fsum(float(case.student[0, place]) for place in own)
            of_teacher = math.fsum(float(case.teacher[0, place]) for place in other)
            expected[own[0]] = _of_coins(losses, of_teacher, temperature)
    return expected


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_divergences_are_those_of_a_slow_count_between_shared_byte_boundaries(
    temperature: float,
) -> None:
    longest = 0
    for seed in range(40):
        case = Case(seed)
        longest = max(longest, *(len(own) for own, _ in case.chunks))
        found = case.divergences(case.student, temperature)
        expected = torch.tensor([_slow(case, temperature)], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert longest > 3


def test_a_chunk_that_lacks_a_loss_of_either_model_is_left_out() -> None:
    left_out = 0
    for seed in range(40):
        case = Case(seed)
        rng = random.Random(seed)
        case.mask[0, rng.randrange(case.mask.shape[1])] = 0.0
        silent = rng.randrange(case.has_loss.shape[1])
        case.has_loss[0, silent] = False
        case.teacher[0, silent] = math.nan
        expected = torch.tensor([_slow(case, TEMPERATURE)], dtype=torch.float64)
        left_out += int((expected == 0).sum())
        torch.testing.assert_close(case.divergences(case.student), expected, rtol=1e-9, atol=1e-9)
    assert left_out > 100


def test_gradients_are_right_in_float64() -> None:
    for seed in range(3):
        case = Case(seed)
        assert torch.autograd.gradcheck(case.divergences, ((case.student + 0.1).requires_grad_(),))


def test_a_model_that_is_sure_of_a_chunk_gives_no_infinite_divergence() -> None:
    losses = torch.zeros(1, 1, requires_grad=True)
    found = divergences(losses, torch.tensor([[5.0]]), torch.tensor([[[0, 1]]]))
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert found.isfinite().all()
    assert losses.grad is not None
    assert losses.grad.isfinite().all()


def test_broken_losses_and_temperatures_are_refused() -> None:
    case = Case(0)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        case.divergences(case.student, 0.0)
    broken = case.student.clone()
    broken[0, 2] = math.nan
    with pytest.raises(NonFiniteLossError, match=r"student_losses\[0, 2\] is nan"):
        case.divergences(broken)
    case.teacher[0, 3] = math.inf
    with pytest.raises(NonFiniteLossError, match=r"teacher_losses\[0, 3\] is inf"):
        case.divergences(case.student)


def test_rows_are_counted_each_by_itself() -> None:
    student, teacher = torch.rand(2, 2) + 1, torch.rand(2, 2) + 1
    spans = torch.tensor([[[0, 1], [1, 2]], [[0, 2], [0, 2]]])
    found = [
        divergences(student[rows], teacher[rows], spans[rows])
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
    ]
    torch.testing.assert_close(found[0], torch.cat(found[1:]))
    assert (found[0] > 0).tolist() == [[True, True], [True, False]]
