import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.guidance import (
    PAPER_RULE,
    SelectionRule,
    aggregate_teacher_losses,
    guided_loss,
    select_tokens,
)
from pipeline.guidance.loss import mapped_tokens
from pipeline.guidance.top_fraction import keep_top_fraction
from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.losses.loss_result import metric_values
from tests.support import reference_guidance as reference

nan = math.nan


@st.composite
def losses_and_spans(draw):
    rows, length = draw(st.integers(0, 3)), draw(st.integers(1, 40))
    num_students = draw(st.integers(0, 30))
    losses = draw(
        hnp.arrays(np.float32, (rows, length), elements=st.floats(0, 100, width=32) | st.just(nan))
    )
    ends = hnp.arrays(np.int64, (rows, num_students, 2), elements=st.integers(0, length))
    return losses, np.sort(draw(ends), -1)


# Few distinct values, so that most draws have ties at the threshold.
small_losses = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.25, 3.0])


@st.composite
def selection_inputs(draw):
    shape = draw(st.tuples(st.integers(1, 3), st.integers(0, 12)))
    student = draw(hnp.arrays(np.float32, shape, elements=small_losses))
    guidance = draw(hnp.arrays(np.float32, shape, elements=small_losses | st.just(nan)))
    mask = draw(hnp.arrays(np.bool_, shape))
    teacher_shape = (shape[0], draw(st.integers(0, 9)))
    teacher = draw(hnp.arrays(np.float32, teacher_shape, elements=small_losses | st.just(nan)))
    fraction = draw(st.sampled_from([0.0, 0.01, 0.29, 0.4, 0.7, 1.0]))
    return student, guidance, mask, teacher, fraction


def ones_like(losses):
    return torch.ones_like(losses, dtype=torch.bool)


def top_of(ranking, fraction):
    count = torch.tensor([ranking.numel()])
    return keep_top_fraction(ranking, ones_like(ranking), fraction, num_candidates=count)


class TestAggregation:
    @given(losses_and_spans(), st.sampled_from(["mean", "max", "sum"]))
    @settings(deadline=None, max_examples=200)
    def test_equals_the_float64_oracle(self, inputs, how):
        losses, spans = inputs
        guidance = aggregate_teacher_losses(torch.tensor(losses), torch.tensor(spans), how)
        assert guidance.dtype == torch.float32
        expected = reference.aggregate(losses, spans, how)
        # a sum is a difference of float64 running sums: exact to 1e-9 nats, whatever stood before
        np.testing.assert_allclose(guidance, expected, rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("how", ["mean", "sum"])
    def test_long_rows_keep_their_precision(self, how):
        losses = torch.full((1, 50_000), 11.7)
        losses[0, -2:] = torch.tensor([1e-4, 3e-4])
        guidance = aggregate_teacher_losses(losses, torch.tensor([[[49_998, 50_000]]]), how)
        expected = {"mean": 2e-4, "sum": 4e-4}[how]
        assert guidance.item() == pytest.approx(expected, rel=1e-6)

    def test_bf16_losses_are_accumulated_in_fp32(self):
        losses = torch.full((1, 1000), 3.0, dtype=torch.bfloat16)
        guidance = aggregate_teacher_losses(losses, torch.tensor([[[0, 1000], [1, 4]]]), "sum")
        assert guidance.tolist() == [[3000.0, 9.0]]

    @pytest.mark.parametrize("value", [math.inf, -math.inf])
    def test_infinite_loss_names_the_row(self, value):
        losses = torch.ones(3, 4)
        losses[2, 1] = value
        with pytest.raises(NonFiniteLossError, match=r"teacher_losses\[2, 1\].*rows \[2\]"):
            aggregate_teacher_losses(losses, torch.zeros(3, 2, 2, dtype=torch.int64))

    def test_nan_where_a_loss_was_expected_names_the_rows(self):
        losses = torch.tensor([[nan, 1.0], [nan, nan], [nan, nan]])
        mask = torch.tensor([[False, True], [False, True], [False, True]])
        spans = torch.zeros(3, 1, 2, dtype=torch.int64)
        with pytest.raises(
            NonFiniteLossError, match=r"teacher_losses\[1, 1\] is nan; 2 .*\[1, 2\]"
        ):
            aggregate_teacher_losses(losses, spans, teacher_loss_mask=mask)

    def test_losses_outside_the_mask_do_not_count(self):
        losses, spans = torch.tensor([[7.0, 1.0]]), torch.tensor([[[0, 2], [0, 1]]])
        mask = torch.tensor([[False, True]])
        guidance = aggregate_teacher_losses(losses, spans, teacher_loss_mask=mask)
        torch.testing.assert_close(guidance, torch.tensor([[1.0, nan]]), equal_nan=True)

    @pytest.mark.parametrize("span", [[-1, 1], [2, 1], [0, 4]])
    def test_span_outside_the_row_is_named(self, span):
        spans = torch.tensor([[[0, 0], span]])
        with pytest.raises(ValueError, match=r"teacher_spans\[0, 1\] is .*other teacher tokens"):
            aggregate_teacher_losses(torch.ones(1, 3), spans)

    def test_wrong_shapes_and_choices_are_named(self):
        losses, spans = torch.ones(2, 3), torch.zeros(2, 4, 2, dtype=torch.int64)
        with pytest.raises(ValueError, match="with the same rows"):
            aggregate_teacher_losses(losses[:1], spans)
        with pytest.raises(ValueError, match="how=median: choose one of mean, max, sum"):
            aggregate_teacher_losses(losses, spans, "median")
        with pytest.raises(ValueError, match=r"teacher_loss_mask \(2, 2\) must have the shape"):
            aggregate_teacher_losses(losses, spans, teacher_loss_mask=torch.ones(2, 2))


class TestMappedTokens:
    @given(losses_and_spans())
    @settings(deadline=None, max_examples=100)
    def test_equals_the_oracle(self, inputs):
        losses, spans = inputs
        mapped = mapped_tokens(torch.tensor(spans), torch.tensor(~np.isnan(losses)))
        np.testing.assert_array_equal(mapped, reference.mapped(spans, ~np.isnan(losses)))


class TestSelection:
    @given(
        selection_inputs(),
        st.sampled_from(["include", "exclude", "mean"]),
        st.sampled_from(["teacher", "teacher_loss"]),
    )
    @settings(deadline=None, max_examples=400)
    def test_equals_the_oracle_under_ties(self, inputs, unmapped, selector):
        student, guidance, mask, teacher, fraction = inputs
        selection = select_tokens(
            torch.tensor(student),
            torch.tensor(guidance),
            loss_mask=torch.tensor(mask),
            rule=SelectionRule(selector, unmapped=unmapped, keep_fraction=fraction),
            teacher_losses=torch.tensor(teacher),
        )
        expected = reference.select(
            student, guidance, mask, fraction, unmapped, teacher_losses=teacher, selector=selector
        )
        np.testing.assert_array_equal(selection.kept, expected)
        assert not (selection.kept & ~torch.tensor(mask)).any()

    def test_a_mean_of_losses_beyond_int64_stays_large(self):
        """One of 10^12 nats is finite, and made the mean negative: unmapped tokens won."""
        selection = select_tokens(
            torch.tensor([[5.0, 5.0]]),
            torch.tensor([[1.0, torch.nan]]),
            loss_mask=torch.ones(1, 2),
            rule=SelectionRule(unmapped="mean", keep_fraction=0.5),
            teacher_losses=torch.tensor([[1.0, 1e12]]),
        )
        assert selection.kept.tolist() == [[True, False]]

    @given(selection_inputs(), st.sampled_from(["include", "exclude", "mean"]))
    @settings(deadline=None, max_examples=100)
    def test_scope_row_is_a_microbatch_for_each_row(self, inputs, unmapped):
        student, guidance, mask, teacher, fraction = map(torch.as_tensor, inputs)
        choose = {"unmapped": unmapped, "keep_fraction": fraction.item()}
        rows = select_tokens(
            student,
            guidance,
            loss_mask=mask,
            rule=SelectionRule(scope="row", **choose),
            teacher_losses=teacher,
        )
        assert rows.threshold.shape == (len(student),)
        for row in range(len(student)):
            one = slice(row, row + 1)
            alone = select_tokens(
                student[one],
                guidance[one],
                loss_mask=mask[one],
                rule=SelectionRule(**choose),
                teacher_losses=teacher[one],
            )
            assert torch.equal(alone.kept, rows.kept[one])
            assert torch.equal(alone.threshold.isnan(), rows.threshold[one].isnan())

    @given(
        hnp.arrays(np.float32, (1, 30), elements=st.floats(width=32, allow_nan=False)),
        st.integers(1, 29),
    )
    @settings(deadline=None)
    def test_top_fraction_of_any_finite_or_infinite_score(self, scores, k):
        kept, threshold = top_of(torch.tensor(scores), k / 30)
        expected = reference.keep_top(scores.astype(np.float64), np.ones((1, 30), bool), k / 30)
        np.testing.assert_array_equal(kept, expected)
        if expected.any():
            assert threshold.item() == scores[expected].min()

    @pytest.mark.parametrize(
        ("fraction", "kept"), [(0.29, 29), (0.57, 57), (0.009, 0), (0.0, 0), (1.0, 100), (1e-09, 0)]
    )
    def test_k_is_the_floor_of_the_decimal_fraction(self, fraction, kept):
        losses = torch.arange(100.0).view(2, 50)
        selection = select_tokens(
            losses,
            torch.zeros_like(losses),
            loss_mask=ones_like(losses),
            rule=SelectionRule(keep_fraction=fraction),
        )
        assert int(selection.kept.sum()) == kept
        assert selection.threshold.isnan().item() == (kept == 0)

    @pytest.mark.parametrize(
        ("selector", "expected"),
        [
            ("full", [1, 1, 1, 1, 1]),
            ("teacher", [0, 1, 1, 0, 1]),
            ("teacher_loss", [0, 1, 1, 0, 1]),
            ("student_loss", [1, 1, 0, 0, 1]),
            ("student_entropy", [0, 0, 1, 1, 1]),
        ],
    )
    def test_selectors_differ_in_the_ranking_only(self, selector, expected):
        student = torch.tensor([[9.0, 8.0, 3.0, 1.0, 0.0]])
        guidance = torch.tensor([[9.0, 1.0, 0.0, 5.0, nan]])
        entropies = torch.tensor([[0.0, 1.0, 2.0, 3.0, 0.0]])
        selection = select_tokens(
            student,
            guidance,
            loss_mask=ones_like(student),
            rule=SelectionRule(selector=selector, keep_fraction=0.5),
            entropies=entropies,
        )
        assert selection.kept.int().tolist() == [expected]

    def test_selectors_without_a_teacher_let_every_token_compete(self):
        losses = torch.tensor([[3.0, 1.0, 2.0, 0.5, 0.1]])
        rule = SelectionRule(selector="student_loss")
        selection = select_tokens(losses, None, loss_mask=ones_like(losses), rule=rule)
        assert selection.kept.int().tolist() == [[1, 0, 1, 0, 0]]

    @given(selection_inputs(), st.sampled_from(["include", "exclude", "mean"]))
    @settings(deadline=None, max_examples=100)
    def test_mapped_stands_for_guidance_that_is_not_ranked_by(self, inputs, unmapped):
        student, guidance, mask, _, fraction = map(torch.as_tensor, inputs)
        rule = SelectionRule("student_loss", fraction.item(), unmapped)
        guided = select_tokens(student, guidance, loss_mask=mask, rule=rule)
        selection = select_tokens(
            student, None, loss_mask=mask, rule=rule, mapped=~guidance.isnan()
        )
        assert torch.equal(selection.kept, guided.kept)
        assert torch.equal(selection.mapped, guided.mapped)
        assert selection.guidance is None
        assert "teacher_loss" not in guided_loss(student, selection).metrics

    def test_random_is_a_function_of_seed_step_and_position(self):
        losses = torch.zeros(4, 1000)

        def kept(seed=0, step=0):
            rule = SelectionRule(selector="random", seed=seed, scope="row")
            mask = ones_like(losses)
            return select_tokens(losses, None, loss_mask=mask, rule=rule, step=step).kept

        first = kept()
        assert torch.equal(first, kept())
        for other in (kept(seed=1), kept(step=1), kept(seed=1, step=1), first.roll(1, 0)):
            # Independent choices of 40 % agree on 0.4 ** 2 + 0.6 ** 2 = 52 % of the tokens.
            assert (first == other).float().mean().item() == pytest.approx(0.52, abs=0.04)
        halves = first.view(4, 2, 500).float().mean(-1)
        assert halves.min() > 0.33

    @pytest.mark.parametrize(
        ("name", "rule"),
        [
            ("student_losses", PAPER_RULE),
            ("guidance", PAPER_RULE),
            ("entropies", SelectionRule("student_entropy")),
            ("teacher_losses", SelectionRule(unmapped="mean")),
        ],
    )
    def test_broken_values_name_the_row(self, name, rule):
        names = ("student_losses", "guidance", "entropies", "teacher_losses")
        inputs = {each: torch.ones(3, 4) for each in names} | {"loss_mask": torch.ones(3, 4)}
        inputs[name][2, 1] = math.inf
        with pytest.raises(NonFiniteLossError, match=rf"{name}\[2, 1\] is inf.*rows \[2\]"):
            select_tokens(**inputs, rule=rule)

    def test_broken_losses_outside_the_mask_do_not_matter(self):
        losses, mask = torch.ones(3, 4), torch.ones(3, 4)
        losses[1, 2], mask[1, 2] = nan, 0
        assert select_tokens(losses, torch.ones(3, 4), loss_mask=mask).kept.sum() == 4

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"guidance": None}, "selector 'teacher' needs guidance"),
            ({"guidance": torch.ones(2, 4)}, r"guidance \(2, 4\) must have the shape"),
            ({"loss_mask": torch.ones(3)}, r"loss_mask \(3,\) must have the shape"),
            ({"rule": SelectionRule("teacher_loss"), "guidance": None}, "'teacher_loss' needs gui"),
            ({"rule": SelectionRule("student_entropy")}, "needs entropies"),
            ({"rule": SelectionRule(unmapped="mean")}, "'mean' needs teacher_losses"),
            ({"mapped": torch.ones(2, 3)}, "mapped and guidance are given"),
            ({"mapped": torch.ones(2, 4), "guidance": None}, r"mapped \(2, 4\) must have the sh"),
            ({"rule": SelectionRule(scope="group")}, "scope 'group' needs a process group"),
            ({"student_losses": torch.ones(3)}, r"must be \[rows, seq_length\], got \(3,\)"),
        ],
    )
    def test_wrong_inputs_are_named(self, arguments, message):
        inputs = {"student_losses": torch.ones(2, 3), "guidance": torch.ones(2, 3)}
        inputs |= {"loss_mask": torch.ones(2, 3), **arguments}
        with pytest.raises(ValueError, match=message):
            select_tokens(**inputs)

    @pytest.mark.parametrize(
        "field",
        [{"selector": "best"}, {"unmapped": "drop"}, {"scope": "global"}, {"keep_fraction": nan}],
    )
    def test_wrong_rules_are_refused(self, field):
        with pytest.raises(ValueError, match=next(iter(field))):
            SelectionRule(**field)


class TestGuidedLoss:
    def setup_method(self):
        self.losses = torch.tensor([[5.0, 1.0, 4.0, 2.0, 3.0, nan]], requires_grad=True)
        guidance = torch.tensor([[1.0, 1.0, 1.0, 1.0, nan, nan]])
        mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
        rule = SelectionRule(keep_fraction=0.5)
        self.selection = select_tokens(self.losses, guidance, loss_mask=mask, rule=rule)

    def test_both_readings_of_the_expectation(self):
        kept = guided_loss(self.losses, self.selection)
        everything = guided_loss(self.losses, self.selection, expectation="all")
        assert kept.loss_sum.item() == everything.loss_sum.item() == 12.0
        assert (kept.num_tokens.item(), everything.num_tokens.item()) == (3, 5)

    def test_gradient_reaches_kept_tokens_only_and_no_nan(self):
        guided_loss(self.losses, self.selection).loss_sum.backward()
        assert self.losses.grad.tolist() == [[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]]

    def test_bf16_losses_are_summed_in_fp32(self):
        losses = torch.full((1, 1000), 3.0, dtype=torch.bfloat16, requires_grad=True)
        rule = SelectionRule("full")
        result = guided_loss(losses, select_tokens(losses, None, loss_mask=losses > 0, rule=rule))
        assert (result.loss_sum.dtype, result.loss_sum.item()) == (torch.float32, 3000.0)
        result.loss_sum.backward()
        assert losses.grad.dtype == torch.bfloat16
        assert (losses.grad == 1).all()

    def test_metrics(self):
        metrics = guided_loss(self.losses, self.selection).metrics
        assert metric_values(metrics) == {
            "student_loss": 3.0,
            "student_loss_mapped": 3.0,
            "student_loss_unmapped": 3.0,
            "student_loss_kept": 4.0,
            "kept_fraction": 0.6,
            "mapped_fraction": 0.8,
            "teacher_loss": 1.0,
            "threshold": 3.0,
        }
        assert not any(value.requires_grad for value in metrics.values())

    def test_metrics_add_up_over_microbatches(self):
        losses, guidance = torch.rand(4, 50), torch.rand(4, 50)
        mask = ones_like(losses)
        rule = SelectionRule(scope="row")

        def metrics(rows):
            selection = select_tokens(losses[rows], guidance[rows], loss_mask=mask[rows], rule=rule)
            return guided_loss(losses[rows], selection).metrics

        parts = [metrics(slice(0, 1)), metrics(slice(1, 4))]
        added = {name: parts[0][name] + parts[1][name] for name in parts[0]}
        assert metric_values(added) == pytest.approx(
            metric_values(metrics(slice(None))), nan_ok=True
        )

    @pytest.mark.parametrize("nothing", ["fraction", "mask", "empty"])
    def test_nothing_kept_gives_zero_and_a_zero_gradient(self, nothing):
        losses = torch.rand(2, 0 if nothing == "empty" else 5, requires_grad=True)
        mask = torch.zeros_like(losses) if nothing == "mask" else ones_like(losses)
        rule = SelectionRule(keep_fraction=0.05)
        selection = select_tokens(losses, torch.zeros_like(losses), loss_mask=mask, rule=rule)
        result = guided_loss(losses, selection)
        result.loss_sum.backward()
        assert (result.loss_sum.item(), result.num_tokens.item()) == (0.0, 0)
        assert not losses.grad.any()
        assert math.isnan(metric_values(result.metrics)["student_loss_kept"])

    def test_wrong_inputs_are_named(self):
        with pytest.raises(ValueError, match=r"kept \(1, 6\) must have the shape"):
            guided_loss(torch.ones(1, 5), self.selection)
        with pytest.raises(ValueError, match="expectation=mean: choose one of kept, all"):
            guided_loss(self.losses, self.selection, expectation="mean")


def test_the_papers_rule_is_the_default():
    assert SelectionRule("teacher", 0.4, "include", "microbatch") == PAPER_RULE


@pytest.mark.parametrize("selector", ["teacher", "random"])
@pytest.mark.parametrize("how", ["mean", "max", "sum"])
def test_a_gpu_selects_the_same_tokens(gpu, selector, how):
    teacher, student = torch.rand(4, 300) * 9, torch.rand(4, 200) * 9
    spans = torch.randint(0, 301, (4, 200, 2)).sort(-1).values
    kept = []
    for device in ("cpu", gpu):
        guidance = aggregate_teacher_losses(teacher.to(device), spans.to(device), how)
        losses = student.to(device)
        rule = SelectionRule(selector=selector, unmapped="mean")
        selection = select_tokens(
            losses,
            guidance,
            loss_mask=ones_like(losses),
            rule=rule,
            teacher_losses=teacher.to(device),
        )
        kept.append(selection.kept.cpu())
    assert torch.equal(*kept)
    assert kept[0].any()
    assert not kept[0].all()
