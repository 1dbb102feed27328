from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.alignment import AlignmentError, align_batch, align_tokens
from pipeline.alignment.kernels import find_cut_points
from pipeline.batches import Ranges, SourceDocument, TokenBatch
from schemas.index import CUT_STRIDE
from tests.support.offset_strategies import (
    TEXT_BYTES,
    make_tokens,
    merged_spans,
    monotone_offsets,
    side_by_side,
    tiling_offsets,
)
from tests.support.reference import Range, is_cut, reference_cuts, reference_spans
from tests.support.text_strategies import texts
from tests.support.tokenizer_zoo import load, shared

PAIRS = st.one_of(
    st.tuples(monotone_offsets(), monotone_offsets()), st.tuples(side_by_side(), side_by_side())
)


def merged(student: list[list[Range]], teacher: list[list[Range]]) -> Ranges:
    return merged_spans(make_tokens(student, TEXT_BYTES), make_tokens(teacher, TEXT_BYTES))


@given(st.lists(PAIRS, max_size=4))
@settings(max_examples=300)
def test_spans_are_those_of_the_quadratic_oracle(documents: list[tuple[list[Range], ...]]) -> None:
    spans = iter(merged([s for s, _ in documents], [t for _, t in documents]).tolist())
    for student, teacher in documents:
        previous = 0
        for expected in reference_spans(student, teacher):
            start, end = next(spans)
            assert ((start, end) if end > start else None) == expected
            assert start >= previous  # what lets a sample store advances
            previous = start
    assert next(spans, None) is None


@given(st.lists(st.tuples(st.integers(0, TEXT_BYTES), st.integers(0, TEXT_BYTES)), min_size=1))
def test_offsets_that_are_not_monotone_are_refused(pairs: list[Range]) -> None:
    starts, ends = [a for a, _ in pairs], [b for _, b in pairs]
    sorted_already = starts == sorted(starts) and ends == sorted(ends)
    assume(not sorted_already or any(a > b for a, b in pairs))
    good = [(0, TEXT_BYTES)]
    with pytest.raises(AlignmentError, match="student offsets decrease in document 1"):
        align_tokens(make_tokens([good, pairs], TEXT_BYTES), make_tokens([good, good], TEXT_BYTES))
    with pytest.raises(AlignmentError, match=r"teacher offsets decrease in document 0"):
        align_tokens(make_tokens([good, good], TEXT_BYTES), make_tokens([pairs, good], TEXT_BYTES))


def test_batches_of_other_documents_are_refused() -> None:
    one, two = make_tokens([[(0, 1)]], 1), make_tokens([[(0, 1)], [(0, 1)]], 1)
    with pytest.raises(AlignmentError, match="student batch has 1 documents, teacher batch 2"):
        align_tokens(one, two)


def test_a_text_of_characters_is_refused() -> None:
    """It was an AttributeError of a library."""
    tokenizer = load("llama_like")
    with pytest.raises(ValueError, match=r"'a' is a str.*: give text\.encode\(\)"):
        align_batch([SourceDocument("a", "ä")], tokenizer, tokenizer)  # type: ignore[arg-type]


def test_no_documents() -> None:
    assert align_tokens(make_tokens([], 0), make_tokens([], 0)).shape == (0, 2)
    batch = align_batch([], load("llama_like"), load("qwen_like"))
    assert batch.teacher_spans.shape == (0, 2)
    assert batch.student.num_documents == 0


class TestAlignBatch:
    @pytest.mark.parametrize(
        ("student", "teacher"),
        [
            ("llama_like", "qwen_like"),
            ("mistral_v1", "gpt2_like"),
            ("sentencepiece_nfkc", "word_pieces"),
            ("unigram", "byte_incomplete"),
        ],
    )
    @given(strings=st.lists(texts(), max_size=4))
    @settings(max_examples=30)
    def test_spans_are_the_oracle_s(self, student: str, teacher: str, strings: list[str]) -> None:
        documents = [SourceDocument(str(d), text.encode()) for d, text in enumerate(strings)]
        batch = align_batch(documents, load(student), load(teacher))
        assert not batch.failures
        for d in range(len(documents)):
            own = slice(*batch.student.cu_tokens[d : d + 2])
            teacher_own = slice(*batch.teacher.cu_tokens[d : d + 2])
            expected = reference_spans(
                batch.student.byte_offsets[own].tolist(),
                batch.teacher.byte_offsets[teacher_own].tolist(),
            )
            found = batch.teacher_spans[own].tolist()
            assert [tuple(span) if span[1] > span[0] else None for span in found] == expected


class TestCutPoints:
    @given(st.lists(st.tuples(tiling_offsets(), tiling_offsets()), max_size=3))
    @settings(max_examples=150)
    def test_are_the_last_shared_boundaries(
        self, documents: list[tuple[list[Range], list[Range]]]
    ) -> None:
        starts, student_cuts, teacher_cuts = cut_points(documents, CUT_STRIDE)
        for d, (student, teacher) in enumerate(documents):
            own = slice(starts[d], starts[d + 1])
            found = list(zip(student_cuts[own].tolist(), teacher_cuts[own].tolist(), strict=True))
            assert found == reference_cuts(student, teacher, CUT_STRIDE)

    @given(st.lists(PAIRS, max_size=3), st.sampled_from([1, 3, CUT_STRIDE]))
    @settings(max_examples=150)
    def test_always_cut(
        self, documents: list[tuple[list[Range], list[Range]]], stride: int
    ) -> None:
        starts, student_cuts, teacher_cuts = cut_points(documents, stride)
        assert starts[0] == 0
        assert starts[-1] == len(student_cuts) == len(teacher_cuts)
        for d, (student, teacher) in enumerate(documents):
            own = slice(starts[d], starts[d + 1])
            found = list(zip(student_cuts[own].tolist(), teacher_cuts[own].tolist(), strict=True))
            assert all(is_cut(student, teacher, i, j) for i, j in found)
            blocks = [i // stride for i, _ in found]
            assert len(set(blocks)) == len(blocks)
            assert found == sorted(found)


def cut_points(
    documents: list[tuple[list[Range], list[Range]]], stride: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    student = make_tokens([s for s, _ in documents], 60)
    teacher = make_tokens([t for _, t in documents], 60)
    arrays = (student.byte_offsets, student.cu_tokens, teacher.byte_offsets, teacher.cu_tokens)
    return find_cut_points(*arrays, merged_spans(student, teacher), stride)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(shared("qwen2_5", 4), shared("mistral", 8), shared("deepseek_llm", 6)),
        shared("llama2", 7),
        ("mistral_v1", 8),
    ],
)
def test_token_counts_of_figure_2(name: str, count: int) -> None:
    batch = load(name).tokenize_batch([b"Probability, Uncertainty"])
    assert len(batch.input_ids) == count
    assert batch.tiles.all()


class Blind:
    """A tokenizer that reports no offsets for one text, as a lossy model might."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def tokenize_batch(self, texts: Sequence[bytes]) -> TokenBatch:
        batch = load("qwen_like").tokenize_batch(texts)
        for place, text in enumerate(texts):
            if text == self.text:
                batch.byte_offsets[batch.cu_tokens[place] : batch.cu_tokens[place + 1]] = 0
        return batch


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_documents_that_fail_are_left_out_with_the_reason(side: str) -> None:
    texts = [b"one", b"two", b"a\xffb", b"three"]
    documents = [SourceDocument(str(n), text) for n, text in enumerate(texts)]
    sides = {"student": load("qwen_like"), "teacher": load("qwen_like"), side: Blind(b"two")}
    aligned = align_batch(documents, sides["student"], sides["teacher"])
    assert aligned.failures == [
        (documents[1], f"{side}: its tokens cover no byte"),
        (documents[2], "student: not valid UTF-8 at byte 1"),
    ]
    assert list(aligned.documents) == [documents[0], documents[3]]
    whole = align_batch([documents[0], documents[3]], load("qwen_like"), load("qwen_like"))
    np.testing.assert_array_equal(aligned.teacher_spans, whole.teacher_spans)
    assert not aligned.student.failures
