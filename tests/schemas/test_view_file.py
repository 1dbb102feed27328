"""A view's payloads: what goes in comes out, and nothing else is read."""

from contextlib import suppress
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dataset.view_encoding import encode_views, unpack
from schemas.document import AlignedDocument
from schemas.errors import DamagedSampleError
from schemas.view_file import Side, decode_view, encode_view, pack_bits, unpack_bits
from tests.support.documents import assert_same, documents, make_document, to_batch

SIDES = st.sampled_from(get_args(Side))
SAMPLE = make_document(
    "doc-1",
    b"Probability, Uncertainty",
    [(0, 4), (4, 11), (11, 12), (12, 24)],
    [(0, 11), (11, 12), (12, 16), (16, 20), (20, 24)],
    teacher_ids=[65535, 65536, 7, 151643, 1],
)


def emptied(document: AlignedDocument, side: Side) -> AlignedDocument:
    """The document before it is seen through a view: another tokenization of one side."""
    other = make_document("", b"", [], [])
    if side == "student":
        return replace(document, student=other.student, teacher_spans=other.teacher_spans)
    return replace(document, teacher=other.teacher)


@given(documents(), SIDES)
def test_a_document_comes_back(document: AlignedDocument, side: Side) -> None:
    payload = encode_view(document, side)
    count = len(getattr(document, side))
    assert_same(decode_view(payload, emptied(document, side), side, count), document)


@given(st.lists(documents(), max_size=5), SIDES)
def test_batches_give_the_same_bytes(items: list[AlignedDocument], side: Side) -> None:
    encoded = encode_views(to_batch(items, [b"x" * d.num_text_bytes for d in items]), side)
    expected = [encode_view(document, side) for document in items]
    assert encoded.data.tobytes() == b"".join(expected)
    assert encoded.payload_bytes.tolist() == [len(payload) for payload in expected]


@given(st.lists(st.integers(0, 2**32 - 1)), st.integers(0, 32), st.integers(0, 3))
def test_bits_are_those_of_one_large_number(values: list[int], bits: int, before: int) -> None:
    values = [value % (1 << bits) for value in values]
    data = pack_bits(np.array(values, np.int64), bits)
    number = sum(value << bits * place for place, value in enumerate(values))
    assert data == number.to_bytes((bits * len(values) + 7) // 8, "little")
    assert unpack_bits(data, bits, len(values)).tolist() == values
    out = np.empty(len(values), np.uint32)
    padded = np.frombuffer(bytes(before) + data, np.uint8)
    assert unpack(padded, before, bits, out) == before + len(data)
    assert out.tolist() == values


def test_the_bytes_are_those_of_the_specification() -> None:
    assert encode_view(SAMPLE, "teacher") == bytes.fromhex(
        "01 12 04 00 01 02"  # the tokens tile the text; bits of ids, bytes, starts, spans
        "ff ff 00 00 74 00 c0 16 94 01 00 00"  # 65535, 65536, 7, 151643, 1
        "1b 44 04"  # 11, 1, 4, 4, 4
        "0c"  # 0, 0, 1, 1
        "d5"  # 1, 1, 1, 3
    )


@given(documents(), SIDES, st.data())
def test_what_is_cut_or_altered_is_refused_or_another_document(
    document: AlignedDocument, side: Side, data: st.DataObject
) -> None:
    whole = encode_view(document, side)
    payload = bytearray(whole)
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    bare, count = emptied(document, side), len(getattr(document, side))
    for damaged in (whole[:-1], whole + b"\0"):
        with pytest.raises(DamagedSampleError):
            decode_view(damaged, bare, side, count)
    with suppress(DamagedSampleError):  # what decodes is another document: CRC-32 tells
        decode_view(bytes(payload), bare, side, count)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x01", "1 bytes are no header"),
        (b"\x02\0\0\0\0\0", "its header is 020000000000"),
        (b"\x01\x21\0\0\0\0", "its header is 012100000000"),
        (b"\x01\x08\0\0\0\0", "it ends at byte 6, a column at byte 11"),
        (b"\x01\0\0\0\0\0\0", "it has 7 bytes, its columns 6"),
        (b"\x01\0\0\0\0\0", "tokens cover 0 of 24 bytes"),
    ],
)
def test_errors_say_what_is_wrong(payload: bytes, message: str) -> None:
    with pytest.raises(DamagedSampleError, match=f'"doc-1" are unreadable \\({message}'):
        decode_view(payload, SAMPLE, "teacher", 5)


def test_a_value_beyond_32_bits_is_refused() -> None:
    ids = SAMPLE.teacher.input_ids.copy()
    ids[1] = 1 << 32
    with pytest.raises(ValueError, match="a view can't hold 4294967296"):
        encode_view(replace(SAMPLE, teacher=replace(SAMPLE.teacher, input_ids=ids)), "teacher")
