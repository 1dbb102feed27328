"""Plans: every token once, lengths kept, cuts only at shared boundaries, little padding."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.packing.kernels import ENDS, FORCED, STARTS
from pipeline.packing.plan import require_sound
from pipeline.packing.rules import PackingRules, suggest_teacher_seq_length
from schemas.manifest import default_convention
from tests.support.streaming_data import (
    STUDENT_BOS,
    STUDENT_EOS,
    TEACHER_EOS,
    around,
    index_of,
    make_documents,
    plan_indices,
    write_dataset,
)

BOS_EOS = around(1, 1, 2)
CONVENTIONS = [around(), BOS_EOS, around(3, 3, None), around(1, None, 2), around(None, 7, None)]


@st.composite
def documents(draw):
    """Return one document's token counts and cut points: monotone, with gaps of any size."""
    num_student = draw(st.integers(0, 120))
    num_teacher = draw(st.integers(0, 120))
    places = draw(
        st.lists(st.tuples(st.integers(0, num_student), st.integers(0, num_teacher)), max_size=40)
    )
    students = sorted({student for student, _ in places})
    teachers = sorted(teacher for _, teacher in places)[: len(students)]
    return num_student, num_teacher, list(zip(students, teachers, strict=True))


@settings(max_examples=150)
@given(
    shards=st.lists(st.lists(documents(), max_size=12), min_size=1, max_size=4),
    seq_length=st.integers(6, 60),
    teacher_seq_length=st.integers(6, 60),
    student=st.sampled_from(CONVENTIONS),
    teacher=st.sampled_from(CONVENTIONS),
    window_rows=st.integers(1, 8),
)
def test_every_token_stands_in_exactly_one_row(
    shards, seq_length, teacher_seq_length, student, teacher, window_rows
):
    rules = PackingRules(seq_length, teacher_seq_length, student, teacher, window_rows)
    indices = [index_of(*([d[n] for d in shard] for n in range(3))) for shard in shards]
    plan = plan_indices(indices, rules)
    flat = [document for shard in shards for document in shard]

    by_document = {number: [] for number in range(len(flat))}
    for number, *piece in plan.segments.tolist():
        by_document[number].append(piece)
    for number, (num_student, num_teacher, cuts) in enumerate(flat):
        _check_document(sorted(by_document[number]), num_student, num_teacher, cuts)

    student_lengths, teacher_lengths = plan.row_lengths()
    assert student_lengths.max(initial=0) <= seq_length
    assert teacher_lengths.max(initial=0) <= teacher_seq_length
    assert np.all(np.diff(plan.row_starts) > 0), "no row is empty"
    assert plan.row_starts[-1] == len(plan.segments)
    assert plan.window_row_starts[-1] == len(plan)
    assert plan.shard_document_starts.tolist() == np.cumsum([0, *map(len, shards)]).tolist()


def _check_document(pieces, num_student, num_teacher, cuts):
    """Check that pieces tile the document and meet at cuts unless they were forced."""
    here = (0, 0)
    for place, (s_start, s_stop, t_start, t_stop, flags) in enumerate(pieces):
        assert (s_start, t_start) == here
        here = (s_stop, t_stop)
        last = place == len(pieces) - 1
        assert bool(flags & STARTS) == (place == 0)
        assert bool(flags & ENDS) == last
        if not last and not flags & FORCED:
            assert here in cuts
    assert here == (num_student, num_teacher)


def test_a_document_is_cut_at_the_last_shared_boundary_that_fits():
    cuts = [(16, 10), (30, 20), (47, 31), (60, 44), (80, 61)]
    plan = plan_indices([index_of([90], [70], [cuts])], PackingRules(34, 40, BOS_EOS, around()))
    segments = sorted(plan.segments.tolist())
    assert segments == [
        (0, 0, 30, 0, 20, STARTS),  # BOS and 33 tokens would fit; 30 is the last cut within.
        (0, 30, 60, 20, 44, 0),
        (0, 60, 90, 44, 70, ENDS),  # BOS, 30 tokens and EOS
    ]
    assert plan.num_forced_segments == 0


@pytest.mark.parametrize(
    "cuts", [[(16, 10), (30, 90)], [(20, 4_000_000_000)], [(20, 30), (40, 10)]]
)
def test_cut_points_that_do_not_rise_are_refused(cuts):
    """Of an index that lies with the right hash: segments would reach beyond their documents."""
    with pytest.raises(ValueError, match="cut points are out of order"):
        plan_indices([index_of([90], [70], [cuts])], PackingRules(34, 40, BOS_EOS, around()))


def test_a_run_without_shared_boundary_is_divided_and_marked():
    plan = plan_indices([index_of([100], [300], [[]])], PackingRules(64, 64, BOS_EOS, BOS_EOS))
    assert plan.num_forced_segments == len(plan.segments) == 5
    assert sorted(segment[1:3] for segment in plan.segments.tolist())[-1] == (80, 100)


def test_padding_is_below_one_percent_at_2048():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(700), 1.0, 6000), 16, 200_000).astype(np.int64)
    cuts = [
        [(place, place * 8 // 10) for place in range(16, length, 16)] for length in lengths.tolist()
    ]
    index = index_of(lengths, lengths * 8 // 10 + 1, cuts)
    plan = plan_indices([index], PackingRules(2048, 2048, BOS_EOS, BOS_EOS))
    student_padding, teacher_padding = plan.padding()
    assert student_padding < 0.01
    assert 0.1 < teacher_padding < 0.3


def test_no_documents_make_no_rows():
    plan = plan_indices([index_of([], [], [])], PackingRules(64, 64, BOS_EOS, BOS_EOS))
    assert len(plan) == 0
    assert plan.padding() == (1.0, 1.0)
    assert plan.max_segments == 0


@pytest.mark.parametrize(
    ("bos", "eos", "adds_bos", "expected"),
    [
        (1, 2, True, around(1, 1, 2)),
        (None, 9, False, around(9, 9, 9)),
        (1, 2, False, around(2, 2, 2)),
        (1, None, False, around(1, 1, None)),
        (None, None, False, around(None, None, None)),
    ],
)
def test_default_conventions_give_every_text_token_a_context(bos, eos, adds_bos, expected):
    assert default_convention(bos, eos, adds_bos=adds_bos) == expected


def test_impossible_lengths_are_refused_with_the_value():
    with pytest.raises(ValueError, match=r"seq_length 3 is not in 4"):
        PackingRules(3, 64, BOS_EOS, BOS_EOS)
    with pytest.raises(ValueError, match=r"teacher_seq_length 0 is not in 4"):
        PackingRules(64, 0, BOS_EOS, BOS_EOS)
    with pytest.raises(ValueError, match=r"window_rows=0: it must be at least 1"):
        PackingRules(64, 64, BOS_EOS, BOS_EOS, window_rows=0)


def test_suggested_teacher_length_leaves_the_student_the_limit(tmp_path):
    dataset = write_dataset(tmp_path, make_documents([400] * 6), shard_sizes=[6])
    length = suggest_teacher_seq_length(dataset.manifest, 256)
    totals = dataset.manifest.totals
    needed = 256 * totals["num_teacher_tokens"] / totals["num_student_tokens"]
    assert length % 64 == 0
    assert needed < length < needed * 1.125 + 64
    rules = PackingRules.of_dataset(dataset.manifest, seq_length=256)
    assert rules == PackingRules(
        256, length, around(STUDENT_BOS, STUDENT_BOS, STUDENT_EOS), around(TEACHER_EOS, TEACHER_EOS)
    )


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_plan_is_checked_on_both_sides(side):
    """What the loops over rows write is as long as a plan says, of the teacher's tokens, too."""
    documents = [index_of([40, 10], [40, 10], [[], []])]
    plan = plan_indices(documents, PackingRules(64, 64, around(), around()))
    counts = {"student": np.array([40, 10], np.uint32), "teacher": np.array([40, 10], np.uint32)}
    require_sound(plan, *counts.values())
    length = "seq_length" if side == "student" else "teacher_seq_length"
    narrow = replace(plan, rules=replace(plan.rules, **{length: 49}))
    with pytest.raises(ValueError, match="row 0 has a segment beyond its document, or too many"):
        require_sound(narrow, *counts.values())
    for place, changed in ((0, 39), (0, 41), (1, 9), (1, 11)):
        other = counts[side].copy()
        other[place] = changed  # a segment is beyond its document, or doesn't end it
        with pytest.raises(ValueError, match="row 0 has a segment beyond its document"):
            require_sound(plan, *(counts | {side: other}).values())
    for field, value in (("start", 41), ("start", 1), ("stop", 39)):
        segments = plan.segments.copy()
        segments[f"{side}_{field}"][0] = value
        with pytest.raises(ValueError, match="row 0 has a segment beyond its document"):
            require_sound(replace(plan, segments=segments), *counts.values())
