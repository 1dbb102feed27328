import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.guidance import SelectionRule
from pipeline.guidance.baselines import (
    row_chunk_ids,
    select_by_reference,
    select_by_self_reference,
    select_chunks,
)
from pipeline.losses.loss_checks import NonFiniteLossError
from tests.support import reference_guidance as reference

nan = math.nan


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
