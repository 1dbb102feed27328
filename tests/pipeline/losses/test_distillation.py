import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.losses.distillation import (
    distillation_loss,
    kld_losses,
    truncated_pairs,
    uld_losses,
)
from pipeline.losses.loss_checks import NonFiniteLossError
from tests.support import reference_guidance as reference

nan = math.nan


def logits(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


DISTANCES = {"kld": (kld_losses, reference.kld), "uld": (uld_losses, reference.uld)}
SIZES = {"kld": [(50, 50)], "uld": [(30, 50), (50, 30)]}
CASES = [(name, sizes) for name in DISTANCES for sizes in SIZES[name]]


class TestDistances:
    @pytest.mark.parametrize(("name", "sizes"), CASES)
    @pytest.mark.parametrize(
        ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
    )
    def test_equal_the_float64_oracle(self, name, sizes, dtype, atol):
        distance, slow = DISTANCES[name]
        student, teacher = (logits(7, n, seed=i).to(dtype) for i, n in enumerate(sizes))
        expected = slow(student.double().numpy(), teacher.double().numpy())
        np.testing.assert_allclose(distance(student, teacher), expected, atol=atol)

    @pytest.mark.parametrize(("name", "sizes"), CASES)
    def test_gradients_reach_the_student_only(self, name, sizes):
        distance = DISTANCES[name][0]
        student, teacher = (logits(3, n // 5, seed=i).requires_grad_() for i, n in enumerate(sizes))
        assert torch.autograd.gradcheck(lambda s: distance(s, teacher), (student,))
        distance(student, teacher).sum().backward()
        assert teacher.grad is None

    def test_tokens_that_are_excluded(self):
        """What the student excludes adds nothing; what the teacher alone excludes is infinite."""
        student, teacher = logits(2, 5), logits(2, 5, seed=1)
        student[0, 2] = teacher[0, 2] = student[1, 3] = -math.inf
        expected = reference.kld(student.numpy(), teacher.numpy())
        student.requires_grad_()
        divergence = kld_losses(student, teacher)
        np.testing.assert_allclose(divergence.detach(), expected)
        divergence.sum().backward()
        assert student.grad.isfinite().all()
        assert student.grad[0, 2] == 0
        assert kld_losses(teacher, student)[1] == math.inf

    def test_the_papers_vocabularies_differ_by_padding_only(self):
        """Llemma's 32,016 rows and Llama's 32,000: the 16 get no probability and no gradient."""
        student, teacher = logits(2, 320).requires_grad_(), logits(2, 336, seed=1)
        teacher[:, 300:] = 50.0
        divergence = kld_losses(student, teacher, vocab_size=300)
        expected = reference.kld(student.detach().numpy()[:, :300], teacher[:, :300].numpy())
        np.testing.assert_allclose(divergence.detach(), expected)
        divergence.sum().backward()
        assert student.grad[:, :300].any()
        assert not student.grad[:, 300:].any()

    @pytest.mark.parametrize(
        ("shape", "vocab_size", "message"),
        [
            ((2, 6), None, "has 5 and the teacher 6 columns"),
            ((2, 6), 6, r"vocab_size 6 must lie in 1\.\.5"),
            ((3, 5), None, "must be of the same tokens"),
        ],
    )
    def test_wrong_inputs_are_named(self, shape, vocab_size, message):
        with pytest.raises(ValueError, match=message):
            kld_losses(torch.zeros(2, 5), torch.zeros(shape), vocab_size=vocab_size)
        with pytest.raises(ValueError, match="truncated_pairs makes them"):
            uld_losses(torch.zeros(2, 5), torch.zeros(3, 6))


class TestTruncatedPairs:
    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
    @settings(deadline=None)
    def test_pairs_are_truncated_to_the_shorter_segment(self, lengths):
        student, teacher = (
            torch.tensor([0, *np.cumsum([length[side] for length in lengths])]) for side in (0, 1)
        )
        expected = [
            (int(student[segment]) + position, int(teacher[segment]) + position)
            for segment, pair in enumerate(lengths)
            for position in range(min(pair))
        ]
        pairs = torch.stack(truncated_pairs(student, teacher), -1).tolist()
        assert [tuple(pair) for pair in pairs] == expected

    def test_pairs_of_different_documents_are_refused(self):
        with pytest.raises(ValueError, match="has 1 segments and teacher_cu_seqlens 2"):
            truncated_pairs(torch.tensor([0, 2]), torch.tensor([0, 1, 2]))


class TestDistillationLoss:
    def test_sum_count_metrics_and_gradients(self):
        losses = torch.tensor([[1.0, 2.0, nan]], requires_grad=True)
        divergences = torch.tensor([[4.0, 6.0, nan]], requires_grad=True)
        mask = torch.tensor([[1, 1, 0]])
        result = distillation_loss(losses, divergences, loss_mask=mask, weight=0.5)
        assert (result.loss_sum.item(), result.num_tokens.item()) == (8.0, 2)
        assert result.metrics["divergence"].tolist() == [10.0, 2.0]
        assert result.metrics["student_loss"].tolist() == [3.0, 2.0]
        result.loss_sum.backward()
        assert losses.grad.tolist() == [[1.0, 1.0, 0.0]]
        assert divergences.grad.tolist() == [[0.5, 0.5, 0.0]]

    def test_the_cross_entropy_may_be_of_some_tokens_only(self):
        losses = torch.tensor([[1.0, 2.0, nan]], requires_grad=True)
        kept, mask = torch.tensor([[False, True, True]]), torch.tensor([[1, 1, 0]])
        result = distillation_loss(losses, torch.ones(1, 3), loss_mask=mask, weight=3, kept=kept)
        assert (result.loss_sum.item(), result.num_tokens.item()) == (8.0, 2)
        assert result.metrics["kept_fraction"].tolist() == [1.0, 2.0]
        result.loss_sum.backward()
        assert losses.grad.tolist() == [[0.0, 1.0, 0.0]]

    def test_broken_inputs_are_named(self):
        losses, broken = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, math.inf]])
        with pytest.raises(NonFiniteLossError, match=r"student_losses\[1, 1\] is inf.*rows \[1\]"):
            distillation_loss(broken, losses, loss_mask=losses, weight=1.0)
        with pytest.raises(NonFiniteLossError, match=r"divergences\[1, 1\] is inf"):
            distillation_loss(losses, broken, loss_mask=losses, weight=1.0)
        with pytest.raises(ValueError, match="weight must not be negative, got -1"):
            distillation_loss(losses, losses, loss_mask=losses, weight=-1)
