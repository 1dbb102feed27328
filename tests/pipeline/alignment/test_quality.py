import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.alignment import align_batch
from pipeline.alignment.quality import (
    LENGTH_EDGES,
    MAX_BIN,
    AlignmentStatistics,
    count_lengths,
    measure_documents,
    overlap_ratios,
)
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.figures.vocabulary import measure_overlaps
from tests.support.offset_strategies import TEXT_BYTES, make_tokens, merged_spans, monotone_offsets
from tests.support.reference import Range, reference_ratios
from tests.support.tokenizer_zoo import load

Documents = list[tuple[list[Range], list[Range]]]
DOCUMENTS = st.lists(st.tuples(monotone_offsets(), monotone_offsets()), max_size=4)
FIELDS = list(AlignmentStatistics.empty().to_json())


def aligned(documents: Documents) -> AlignedBatch:
    student = make_tokens([s for s, _ in documents], TEXT_BYTES)
    teacher = make_tokens([t for _, t in documents], TEXT_BYTES)
    sources = [SourceDocument(str(d), b"x" * TEXT_BYTES) for d in range(len(documents))]
    return AlignedBatch(sources, student, teacher, merged_spans(student, teacher))


@given(DOCUMENTS)
@settings(max_examples=150)
def test_statistics_are_counted_token_by_token(documents: Documents) -> None:
    batch = aligned(documents)
    found = measure_documents(batch)[0]
    ious, ioses = [], []
    widths = np.zeros(MAX_BIN + 1, np.int64)
    spans = iter(batch.teacher_spans.tolist())
    for student, teacher in documents:
        for own in student:
            first, end = next(spans)
            widths[end - first] += 1
            if end > first:
                iou, ios = reference_ratios(own, teacher[first:end])
                ious.append(iou)
                ioses.append(ios)
    assert found.num_documents == len(documents)
    assert found.num_text_bytes == TEXT_BYTES * len(documents)
    assert found.num_student_tokens == sum(len(s) for s, _ in documents)
    assert found.num_teacher_tokens == sum(len(t) for _, t in documents)
    assert found.num_mapped == len(ious)
    for count, side in ((found.num_student_over_wide, 0), (found.num_teacher_over_wide, 1)):
        assert count == sum(_num_sharing(document[side]) for document in documents)
    assert found.byte_iou_sum == pytest.approx(sum(ious))
    assert found.byte_ios_sum == pytest.approx(sum(ioses))
    assert found.span_width_counts.tolist() == widths.tolist()
    for counts, side in (
        (found.student_token_bytes_counts, 0),
        (found.teacher_token_bytes_counts, 1),
    ):
        sizes = [b - a for document in documents for a, b in document[side]]
        assert counts.tolist() == np.bincount(sizes, minlength=MAX_BIN + 1).tolist()


@given(DOCUMENTS, st.integers(0, 4))
@settings(max_examples=50)
def test_statistics_of_parts_add_up(documents: Documents, cut: int) -> None:
    parts = [measure_documents(aligned(part))[0] for part in (documents[:cut], documents[cut:])]
    whole = measure_documents(aligned(documents))[0].to_json()
    merged = AlignmentStatistics.merge(parts).to_json()
    for name in FIELDS:
        assert merged[name] == pytest.approx(whole[name]), name


def test_wide_spans_and_tokens_share_the_last_bin() -> None:
    student: list[Range] = [(0, 70), (70, 74)]
    teacher: list[Range] = [(i, i + 1) for i in range(70)]
    statistics = measure_documents(aligned([(student, teacher)]))[0]
    assert statistics.span_width_counts[[0, MAX_BIN]].tolist() == [1, 1]
    assert statistics.student_token_bytes_counts[[4, MAX_BIN]].tolist() == [1, 1]
    assert statistics.byte_iou == 1.0


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 5, 6, 1000, 1 << 24, 1 << 26])
def test_documents_are_counted_by_length(num_tokens: int) -> None:
    place = int(np.flatnonzero(count_lengths(np.array([num_tokens])))[0])
    assert LENGTH_EDGES[place] <= num_tokens
    assert place + 1 == len(LENGTH_EDGES) or num_tokens < LENGTH_EDGES[place + 1]


RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@given(st.lists(st.tuples(RANGES, RANGES), min_size=1, max_size=20))
def test_ratios_are_those_of_sets(pairs: list[tuple[list[int], list[int]]]) -> None:
    student, teacher = (np.array([p[side] for p in pairs], np.int64) for side in (0, 1))
    for iou, ios, own, theirs in zip(
        *overlap_ratios(student, teacher), student, teacher, strict=True
    ):
        if own[0] == own[1] or theirs[0] == theirs[1]:
            assert np.isnan(iou)
            assert np.isnan(ios)
        else:
            assert (iou, ios) == pytest.approx(reference_ratios(own, [theirs]))


def test_ios_is_one_whenever_the_teacher_tiles_the_text_and_iou_is_not() -> None:
    documents = [SourceDocument("d", "Probability, Uncertainty: 𝔘 数学 e\u0301".encode())]
    batch = align_batch(documents, load("llama_like"), load("mistral_v1"))
    statistics = measure_documents(batch)[0]
    assert batch.teacher.tiles.all()
    assert statistics.byte_ios == 1.0
    assert 0.5 < statistics.byte_iou < 1.0


def test_vocabularies_are_compared_by_spellings_and_by_bytes() -> None:
    student, teacher = load("llama_like"), load("qwen_like")
    [overlap] = measure_overlaps(student, {"qwen": teacher})
    own, theirs = student.base_vocabulary(), teacher.base_vocabulary()
    assert overlap.raw == len(set(own) & set(theirs)) / len(theirs)
    spelled = set(theirs.values()) - {b""}
    assert overlap.decoded == len(set(own.values()) & spelled) / len(spelled)
    assert overlap.decoded > overlap.raw


def _num_sharing(ranges: list[Range]) -> int:
    covered = [set(range(start, end)) for start, end in ranges]
    pairs = [bool(own & other) for own, other in pairwise(covered)]
    return sum(a or b for a, b in zip([False, *pairs], [*pairs, False], strict=True) if ranges)


def test_over_wide_tokens_are_counted_and_left_out_where_there_are_none() -> None:
    marks = SourceDocument("marks", "\u0634\u0651\u064e".encode())
    found = measure_documents(align_batch([marks], load("llama_like"), load("nfc")))[0]
    batch = load("nfc").tokenize_batch([marks.text])
    assert batch.byte_offsets[-1].tolist() == [2, 6]
    assert (found.num_student_over_wide, found.num_teacher_over_wide) == (0, 4)
    values = json.loads(json.dumps(found.to_json()))
    assert "num_student_over_wide" not in values
    assert AlignmentStatistics.from_json(values).to_json() == found.to_json()
    assert AlignmentStatistics.empty().byte_iou == 0
    assert AlignmentStatistics.merge([found, found]).num_teacher_over_wide == 8
