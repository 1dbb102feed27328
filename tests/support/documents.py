"""Aligned documents without a tokenizer: arrays that fit each other."""

from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import sha256
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from pipeline.alignment.kernels import merge_spans
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from schemas.document import AlignedDocument, Tokens, tiles_text
from schemas.index import ShardIndex
from tests.support.reference import Range

MAX_TEXT_BYTES = 40
IDS = st.one_of(st.integers(0, 300), st.sampled_from([255, 256, 65535, 65536, 0xFFFFFFFF]))


def make_document(
    document_id: str,
    text: bytes,
    student: Sequence[Range],
    teacher: Sequence[Range],
    *,
    student_ids: Sequence[int] = (),
    teacher_ids: Sequence[int] = (),
    keep_text: bool = False,
) -> AlignedDocument:
    """Return an aligned document; ids count from 0 where none are given."""
    sides = [
        Tokens(
            np.array(ids or range(len(offsets)), np.int64),
            np.array(offsets, np.int64).reshape(-1, 2),
        )
        for ids, offsets in ((student_ids, student), (teacher_ids, teacher))
    ]
    arrays = [array for s in sides for array in (s.byte_offsets, np.array([0, len(s)]))]
    spans = merge_spans(*arrays, np.zeros(1, np.bool_)).astype(np.int64)
    return AlignedDocument(
        document_id=document_id,
        text_sha256=sha256(text).hexdigest(),
        num_text_bytes=len(text),
        student=sides[0],
        teacher=sides[1],
        teacher_spans=spans,
        text=text if keep_text else None,
    )


@st.composite
def _offsets(draw: st.DrawFn, num_text_bytes: int) -> list[Range]:
    places = st.lists(st.integers(0, num_text_bytes), max_size=10).map(sorted)
    if draw(st.booleans()):
        bounds = sorted({0, num_text_bytes, *draw(places)})
        return list(pairwise(bounds))
    starts = draw(places)
    ends = sorted(draw(st.integers(start, num_text_bytes)) for start in starts)
    return list(zip(starts, ends, strict=True))


@st.composite
def documents(draw: st.DrawFn, *, keep_text: bool | None = None) -> AlignedDocument:
    """Documents whose tokens tile the text, or don't, with ids of every width."""
    text = draw(st.text(max_size=10).filter(_encodable)).encode()
    student, teacher = draw(_offsets(len(text))), draw(_offsets(len(text)))
    ids = [draw(st.lists(IDS, min_size=len(s), max_size=len(s))) for s in (student, teacher)]
    document_id = draw(st.text(max_size=8).filter(_encodable))
    kept = draw(st.booleans()) if keep_text is None else keep_text
    document = make_document(document_id, text, student, teacher, keep_text=kept)
    return replace(
        document,
        student=replace(document.student, input_ids=np.array(ids[0], np.int64)),
        teacher=replace(document.teacher, input_ids=np.array(ids[1], np.int64)),
    )


def to_batch(items: Sequence[AlignedDocument], texts: Sequence[bytes]) -> AlignedBatch:
    """Return the batch that holds the given documents."""
    spans = [document.teacher_spans for document in items]
    return AlignedBatch(
        documents=[
            SourceDocument(d.document_id, text) for d, text in zip(items, texts, strict=True)
        ],
        student=_join([d.student for d in items], [d.num_text_bytes for d in items]),
        teacher=_join([d.teacher for d in items], [d.num_text_bytes for d in items]),
        teacher_spans=np.concatenate([np.empty((0, 2), np.int64), *spans]),
    )


def assert_same(found: AlignedDocument, expected: AlignedDocument) -> None:
    """Compare every field; where an unmapped token's empty span lies doesn't matter."""
    for name in ("document_id", "text_sha256", "num_text_bytes", "text"):
        assert getattr(found, name) == getattr(expected, name)
    for side in ("student", "teacher"):
        for name in ("input_ids", "byte_offsets"):
            array = getattr(getattr(found, side), name)
            assert array.dtype == np.int64
            np.testing.assert_array_equal(array, getattr(getattr(expected, side), name))
    assert found.teacher_spans.dtype == np.int64
    np.testing.assert_array_equal(found.teacher_spans, expected.teacher_spans)


INDEX_DTYPES = {"byte_iou_sum": np.float32, "cut_student": np.uint32, "cut_teacher": np.uint32}
"""Of texts; an index of chats has more columns, in `chats`."""


def assert_same_index(found: ShardIndex, expected: ShardIndex) -> None:
    """Compare every column."""
    for field in fields(ShardIndex):
        values, wanted = getattr(found, field.name), getattr(expected, field.name)
        if field.name in ("key", "document_id"):
            assert list(values) == list(wanted)
        elif field.name == "metadata":
            assert list(values) == list(wanted)
            assert [v.type for v in values.values()] == [w.type for w in wanted.values()]
            found_lists = [column.to_pylist() for column in values.values()]
            assert found_lists == [column.to_pylist() for column in wanted.values()]
        elif field.name == "chats":
            assert list(values) == list(wanted)
            for name in values:
                np.testing.assert_array_equal(values[name], wanted[name], err_msg=name)
        else:
            assert values.dtype == INDEX_DTYPES.get(field.name, np.int64)
            np.testing.assert_array_equal(values, wanted, err_msg=field.name)


def _join(parts: Sequence[Tokens], sizes: Sequence[int]) -> TokenBatch:
    return TokenBatch(
        input_ids=np.concatenate([np.empty(0, np.int64), *(p.input_ids for p in parts)]).astype(
            np.uint32
        ),
        byte_offsets=np.concatenate([np.empty((0, 2), np.int64), *(p.byte_offsets for p in parts)]),
        cu_tokens=np.cumsum([0, *map(len, parts)], dtype=np.int64),
        tiles=np.array(
            [tiles_text(p.byte_offsets, size) for p, size in zip(parts, sizes, strict=True)],
            np.bool_,
        ),
    )


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
