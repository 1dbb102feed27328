"""Mixtures: shares within one row at every row, epochs used up, any row without those before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.packing import mixture_plan
from pipeline.packing.kernels import interleave
from pipeline.packing.mixture_file import Stage
from pipeline.packing.mixture_plan import Source, plan_mixture


@pytest.mark.parametrize(
    ("shares", "order"),
    [
        ([5, 3, 1], [0, 1, 0, 0, 1, 0, 1, 0, 2]),
        ([7, 0, 2], [0, 0, 0, 2, 0, 0, 0, 0, 2]),
        ([1, 9], [1, 1, 1, 1, 1, 1, 1, 1, 0, 1]),
    ],
)
def test_of_those_that_may_come_the_one_comes_that_must_soonest(shares, order):
    assert interleave(np.array(shares, np.int64))[0].tolist() == order


@settings(max_examples=100)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_after_any_number_of_rows_each_source_is_within_one_row_of_its_share(shares):
    source, before = interleave(np.array(shares, np.int64))
    counts = np.zeros(len(shares), np.int64)
    for n, (chosen, earlier) in enumerate(zip(source, before, strict=True), 1):
        assert earlier == counts[chosen]
        counts[chosen] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count * sum(shares) - n * share) < sum(shares)
    assert counts.tolist() == shares


@pytest.fixture
def short_period(monkeypatch):
    monkeypatch.setattr(mixture_plan, "PERIOD", 64)


@st.composite
def mixtures(draw):
    """Return datasets of a few rows, and stages that are all reached."""
    names = "abcde"[: draw(st.integers(1, 5))]
    sources = [
        Source(
            name,
            num_rows=(num_rows := draw(st.integers(1, 60))),
            num_tokens=num_rows * draw(st.integers(5, 20)),
            max_epochs=draw(st.sampled_from([1, 2, 5])),
        )
        for name in names
    ]
    # The first source never ends, so that every stage is reached.
    endless = draw(st.booleans())
    num_stages = draw(st.integers(1, 4)) if endless else 1
    if endless:
        sources[0] = Source(names[0], sources[0].num_rows, sources[0].num_tokens, None)
    stages = []
    for number in range(num_stages):
        weights = {name: draw(st.integers(1, 5)) for name in names}
        chosen = {names[0], *draw(st.sets(st.sampled_from(names)))} if endless else set(names)
        total = sum(weights[name] for name in chosen)
        parts = {name: weights[name] / total for name in names if name in chosen}
        stages.append(Stage(parts, number * draw(st.integers(300, 900))))
    stages = sorted(stages, key=lambda stage: stage.from_tokens)
    return sources, [s for n, s in enumerate(stages) if not n or s.from_tokens]


@pytest.mark.usefixtures("short_period")
@settings(max_examples=100)
@given(mixtures())
def test_a_plan_reads_every_row_of_every_epoch_once_in_the_shares_of_its_stretches(mixture):
    sources, stages = mixture
    plan = plan_mixture(sources, stages)
    num_rows = plan.num_rows if plan.num_rows is not None else plan.stretches[-1].start + 200
    counts, previous = [0] * len(sources), 0
    for stretch, following in zip(plan.stretches, [*plan.stretches[1:], None], strict=True):
        assert stretch.start == previous
        assert stretch.counts == tuple(counts)
        previous = num_rows if stretch.stop is None else stretch.stop
        assert following is None or following.start == stretch.stop
        for position in range(stretch.start, previous):
            assert plan.counts_before(position) == tuple(counts)
            source, source_position = plan.locate(position)
            assert source_position == counts[source], "rows of a source come in order, none twice"
            counts[source] += 1
            n = position + 1 - stretch.start
            for count, first, share in zip(counts, stretch.counts, stretch.shares, strict=True):
                assert abs((count - first) * 64 - n * share) < 64
    assert previous == num_rows > 0
    for source, count in zip(sources, counts, strict=True):
        assert source.total_rows is None or count <= source.total_rows
        if plan.num_rows is not None:
            assert count == source.total_rows, "the run ends when all is used up"


@pytest.mark.usefixtures("short_period")
@settings(max_examples=100)
@given(mixtures())
def test_stages_begin_within_rows_of_their_tokens_and_their_weights_are_of_tokens(mixture):
    sources, stages = mixture
    plan = plan_mixture(sources, stages)
    largest = sum(source.tokens_per_row for source in sources)
    for number, stage in enumerate(stages[1:], 1):
        starts = [stretch.start for stretch in plan.stretches if stretch.stage == number]
        if starts:
            assert abs(sum(plan.tokens_before(min(starts))) - stage.from_tokens) < largest + 5
    first = plan.stretches[0]
    tokens = [
        share * source.tokens_per_row for share, source in zip(first.shares, sources, strict=True)
    ]
    for source, part in zip(sources, tokens, strict=True):
        # Shares are rounded to a row in the period.
        assert abs(part / sum(tokens) - stages[0].weights.get(source.name, 0)) < 20 / 64


def test_the_period_of_a_run_gives_weights_to_a_millionth():
    sources = [Source("long", 900, 900 * 2000, None), Source("short", 70, 70 * 1300, None)]
    plan = plan_mixture(sources, [Stage({"long": 0.7, "short": 0.3})])
    tokens = plan.tokens_before(10**9)
    assert tokens[0] / sum(tokens) == pytest.approx(0.7, abs=1e-6)
    source, position = plan.locate(10**15)
    assert position == plan.counts_before(10**15)[source]


def test_who_has_given_all_epochs_leaves_its_share_to_the_others():
    sources = [Source("a", 10, 1000, None), Source("b", 10, 1000, 2), Source("c", 10, 1000, None)]
    plan = plan_mixture(sources, [Stage({"a": 0.25, "b": 0.5, "c": 0.25})])
    before, after = plan.stretches
    assert [share / mixture_plan.PERIOD for share in before.shares] == [0.25, 0.5, 0.25]
    assert [share / mixture_plan.PERIOD for share in after.shares] == [0.5, 0, 0.5]
    assert after.counts[1] == 20
    assert plan.locate(after.start - 1) == (1, 19)
    assert before.stop == after.start <= 40


def test_a_stage_that_is_never_reached_is_refused():
    stages = [Stage({"a": 1.0}), Stage({"b": 1.0}, 5000)]
    sources = [Source("a", 10, 1000, 2), Source("b", 10, 1000)]
    with pytest.raises(ValueError, match=r"stage 2 begins at 5000 .* used up after 2000: raise"):
        plan_mixture(sources, stages)


def test_a_last_stage_whose_datasets_are_used_up_is_refused():
    stages = [Stage({"web": 0.5, "math": 0.5}), Stage({"math": 1.0}, 50_000)]
    sources = [Source("web", 90, 9000, None), Source("math", 10, 1000)]
    with pytest.raises(ValueError, match=r"of stage 2 are used up before it begins: raise their"):
        plan_mixture(sources, stages)


def test_a_weight_that_gives_no_row_is_refused():
    sources = [Source("a", 10, 1000), Source("b", 10, 1000)]
    with pytest.raises(ValueError, match=r'weight 1e-09 of "b" is less than one row in 1048576'):
        plan_mixture(sources, [Stage({"a": 1 - 1e-9, "b": 1e-9})])
