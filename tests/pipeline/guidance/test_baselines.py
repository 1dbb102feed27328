import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.guidance import NonFiniteLossError, SelectionRule
from pipeline.guidance.baselines.distillation import (
    distillation_loss,
    kld_losses,
    truncated_pairs,
    uld_losses,
)
from pipeline.guidance.baselines.selection import (
    row_chunk_ids,
    select_by_reference,
    select_by_self_reference,
    select_chunks,
)
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

    def test_golden_values(self):
        teacher, student = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
        expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
        assert kld_losses(student, teacher).item() == pytest.approx(expected)
        student, teacher = torch.tensor([0.2, 0.8]).log(), torch.tensor([0.1, 0.6, 0.3]).log()
        assert uld_losses(student, teacher).item() == pytest.approx(0.2 + 0.1 + 0.1)
        assert uld_losses(logits(4, 20), logits(4, 20).flip(-1)).max() < 1e-14, "no order"

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


LOSSES = hnp.arrays(np.float32, (2, 9), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
MASKS = hnp.arrays(np.bool_, (2, 9))


class TestRho1:
    @given(LOSSES, LOSSES, MASKS, st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    @settings(deadline=None)
    def test_equals_the_oracle(self, student, guidance, mask, fraction):
        selection = select_by_reference(
            torch.tensor(student),
            torch.tensor(guidance),
            loss_mask=torch.tensor(mask),
            rule=SelectionRule(keep_fraction=fraction),
        )
        expected = reference.keep_top((student - guidance).astype(np.float64), mask, fraction)
        np.testing.assert_array_equal(selection.kept, expected)

    def test_missing_reference_loss_names_the_row(self):
        losses, broken = torch.ones(1, 3), torch.tensor([[1.0, 1.0, nan]])
        with pytest.raises(NonFiniteLossError, match=r"reference_losses\[0, 2\] is nan"):
            select_by_reference(losses, broken, loss_mask=losses, rule=SelectionRule())


class TestRho1Self:
    def test_both_must_be_low(self):
        selection = select_by_self_reference(
            torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0]]),
            torch.tensor([[4.0, 1.0, 2.0, 3.0, 0.0]]),
            loss_mask=torch.tensor([[1, 1, 1, 1, 0]]),
            rule=SelectionRule(keep_fraction=0.75),
        )
        assert selection.kept.int().tolist() == [[0, 1, 1, 0, 0]]
        assert selection.mapped.int().tolist() == [[1, 1, 1, 1, 0]]
        assert selection.threshold.tolist() == [-3.0]

    @given(
        LOSSES,
        LOSSES,
        MASKS,
        st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        st.sampled_from(["microbatch", "row"]),
    )
    @settings(deadline=None)
    def test_equals_the_oracle(self, losses, entropies, mask, fraction, scope):
        selection = select_by_self_reference(
            torch.tensor(losses),
            torch.tensor(entropies),
            loss_mask=torch.tensor(mask),
            rule=SelectionRule(keep_fraction=fraction, scope=scope),
        )
        rows = [slice(0, 2)] if scope == "microbatch" else [slice(0, 1), slice(1, 2)]
        wide = losses.astype(np.float64), entropies.astype(np.float64)
        expected = [
            reference.easiest(*(each[row] for each in wide), mask[row], fraction) for row in rows
        ]
        np.testing.assert_array_equal(selection.kept, np.concatenate(expected))

    def test_broken_values_name_the_row(self):
        losses, mask, rule = torch.ones(2, 3), torch.ones(2, 3), SelectionRule(keep_fraction=0.7)
        broken = losses.clone()
        broken[1, 2] = nan
        with pytest.raises(NonFiniteLossError, match=r"reference_losses\[1, 2\] is nan"):
            select_by_self_reference(broken, losses, loss_mask=mask, rule=rule)
        with pytest.raises(NonFiniteLossError, match=r"reference_entropies\[1, 2\] is nan"):
            select_by_self_reference(losses, broken, loss_mask=mask, rule=rule)
        mask[1, 2] = 0
        assert select_by_self_reference(broken, broken, loss_mask=mask, rule=rule).kept.sum() == 3


def chunks_of(rows, length, num_chunks):
    return row_chunk_ids(torch.ones(rows, length, dtype=torch.bool), num_chunks)


class TestChunking:
    @given(hnp.arrays(np.bool_, (2, 20)), st.sampled_from([1, 3, 8]))
    @settings(deadline=None)
    def test_chunks_of_rows(self, is_text, num_chunks):
        ids = row_chunk_ids(torch.tensor(is_text), num_chunks)
        assert ids.tolist() == [reference.chunk_ids(row, num_chunks) for row in is_text.tolist()]

    @given(st.data(), st.sampled_from([8, 16, 32, 64]), st.sampled_from([0.1, 0.4, 1.0]))
    @settings(deadline=None, max_examples=60)
    def test_equals_the_oracle(self, data, num_chunks, fraction):
        # Multiples of 1/4 have exact means up to fp64 rounding, so equal means tie in both.
        quarters = st.integers(0, 12).map(lambda quarter: quarter / 4)
        student = data.draw(hnp.arrays(np.float64, (2, 70), elements=quarters))
        teacher = data.draw(hnp.arrays(np.float64, (2, 90), elements=quarters | st.just(nan)))
        mask = data.draw(hnp.arrays(np.bool_, (2, 70)))
        student_ids, teacher_ids = chunks_of(2, 70, num_chunks), chunks_of(2, 90, num_chunks)
        selection = select_chunks(
            torch.tensor(student),
            torch.tensor(teacher),
            student_chunk_ids=student_ids,
            teacher_chunk_ids=teacher_ids,
            num_chunks=num_chunks,
            loss_mask=torch.tensor(mask),
            rule=SelectionRule(keep_fraction=fraction),
        )
        expected = reference.keep_chunks(
            student, teacher, student_ids.numpy(), teacher_ids.numpy(), mask, fraction
        )
        np.testing.assert_array_equal(selection.kept, expected)

    def golden(self, **changes):
        inputs = {
            "student_losses": torch.tensor([[1.0, 3.0, 5.0, 5.0, 9.0, 9.0, 2.0, 7.0]]),
            "teacher_losses": torch.tensor([[nan, 1.0, 4.0, nan, nan, 1.0]]),
            "student_chunk_ids": torch.tensor([[0, 0, 1, 1, 2, 2, 3, -1]]),
            "teacher_chunk_ids": torch.tensor([[0, 0, 1, 2, -1, 3]]),
            "num_chunks": 4,
            "loss_mask": torch.ones(1, 8),
        }
        return select_chunks(**{**inputs, **changes})

    @pytest.mark.parametrize("unmapped", ["include", "exclude", "mean"])
    def test_whole_chunks_are_kept(self, unmapped):
        """Two of four, whatever happens to unmapped tokens elsewhere."""
        selection = self.golden(rule=SelectionRule(keep_fraction=0.5, unmapped=unmapped))
        # Differences 1, 1, 9 - the average 2, 1; the first chunk wins the tie.
        assert selection.kept.int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]]
        assert selection.mapped.int().tolist() == [[1, 1, 1, 1, 0, 0, 1, 0]]
        torch.testing.assert_close(
            selection.guidance, torch.tensor([[1.0, 1, 4, 4, nan, nan, 1, nan]]), equal_nan=True
        )

    def test_losses_of_no_chunk_do_not_count(self):
        """As of padding, which online teachers score, too."""
        teacher_losses = torch.tensor([[nan, 1.0, 4.0, nan, 1000.0, 1.0]])
        selection = self.golden(
            teacher_losses=teacher_losses, rule=SelectionRule(keep_fraction=0.5)
        )
        assert torch.equal(selection.kept, self.golden(rule=SelectionRule(keep_fraction=0.5)).kept)

    def test_random_keeps_whole_chunks_by_chance(self):
        losses = torch.zeros(50, 64)
        ids = chunks_of(50, 64, 16)

        def kept(step):
            return select_chunks(
                losses,
                None,
                student_chunk_ids=ids,
                teacher_chunk_ids=ids,
                num_chunks=16,
                loss_mask=torch.ones_like(losses),
                rule=SelectionRule("random", scope="microbatch"),
                step=step,
            ).kept

        first = kept(0)
        assert first.sum().item() == 0.4 * 50 * 16 * 4
        assert torch.equal(first, first[:, ::4].repeat_interleave(4, dim=1))
        assert torch.equal(first, kept(0))
        assert not torch.equal(first, kept(1))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"teacher_losses": None}, "'teacher' needs guidance"),
            ({"student_losses": torch.full((1, 8), nan)}, r"student_losses\[0, 0\] is nan"),
            ({"teacher_losses": torch.full((1, 6), math.inf)}, r"guidance\[0, 0\] is inf"),
            ({"loss_mask": torch.ones(1, 7)}, "must have the shape of student_losses"),
        ],
    )
    def test_wrong_inputs_are_named(self, changes, message):
        with pytest.raises(ValueError, match=message):
            self.golden(**changes)
        with pytest.raises(ValueError, match="num_chunks must be positive, got 0"):
            chunks_of(1, 3, 0)
