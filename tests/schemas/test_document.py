import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.document import (
    AlignedDocument,
    decode_document,
    decode_spans,
    decode_tensors,
    document_key,
    tiles_text,
)
from schemas.errors import DamagedSampleError, DatasetError, SchemaVersionError
from tests.support.documents import assert_same, documents, make_document
from tests.support.sample_encoder import encode_document

TEXT = "the sum 🤗".encode()
DOCUMENT = make_document(
    "doc-1",
    TEXT,
    [(0, 3), (3, 7), (7, 8), (8, 12)],
    [(0, 7), (7, 10), (10, 12)],
    student_ids=[5, 300, 7, 70000],
    keep_text=True,
)


def rewritten(change: Callable[[dict[str, Any]], None], body: bytes | None = None) -> bytes:
    """The sample with its JSON header changed."""
    sample = encode_document(DOCUMENT)
    (size,) = struct.unpack_from("<Q", sample)
    header = json.loads(sample[8 : 8 + size])
    change(header)
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data + (sample[8 + size :] if body is None else body)


@given(documents())
@settings(max_examples=300)
def test_round_trip(document: AlignedDocument) -> None:
    assert_same(decode_document(encode_document(document)), document)


@given(documents())
def test_safetensors_reads_what_we_write(document: AlignedDocument) -> None:
    sample = encode_document(document)
    tensors, metadata = decode_tensors(sample)
    theirs = safetensors.numpy.load(sample)
    assert set(theirs) == set(tensors)
    for name, tensor in theirs.items():
        assert tensor.dtype == tensors[name].dtype
        np.testing.assert_array_equal(tensor, tensors[name])
    (size,) = struct.unpack_from("<Q", sample)
    assert json.loads(sample[8 : 8 + size])["__metadata__"] == metadata
    assert size % 8 == 0


@given(documents())
def test_we_read_what_safetensors_writes(document: AlignedDocument) -> None:
    tensors, metadata = decode_tensors(encode_document(document))
    theirs = safetensors.numpy.save({n: np.array(t) for n, t in tensors.items()}, dict(metadata))
    assert_same(decode_document(theirs), document)


def test_tensors_and_metadata() -> None:
    tensors, metadata = decode_tensors(encode_document(DOCUMENT))
    assert {name: (t.dtype.str, t.tolist()) for name, t in tensors.items() if name != "text"} == {
        "student.input_ids": ("<u4", [5, 300, 7, 70000]),
        "student.token_bytes": ("|u1", [3, 4, 1, 4]),
        "teacher.input_ids": ("|u1", [0, 1, 2]),
        "teacher.token_bytes": ("|u1", [7, 3, 2]),
        "span.advance": ("|u1", [0, 0, 1, 0]),
        "span.width": ("|u1", [1, 1, 1, 2]),
    }
    assert tensors["text"].tobytes() == TEXT
    assert metadata == {
        "document_id": "doc-1",
        "num_text_bytes": "12",
        "schema_version": "2",
        "text_sha256": DOCUMENT.text_sha256,
    }


def test_tokens_that_do_not_tile_the_text_store_their_offsets() -> None:
    document = make_document("d", b"a b", [(0, 1), (2, 3)], [(0, 3)])
    tensors, _ = decode_tensors(encode_document(document))
    assert tensors["student.byte_offsets"].tolist() == [[0, 1], [2, 3]]
    assert "student.token_bytes" not in tensors
    assert "teacher.byte_offsets" not in tensors


def test_an_unmapped_token_stands_where_the_last_span_started() -> None:
    spans = decode_spans(np.array([2, 0, 3, 0], np.uint8), np.array([2, 0, 1, 1], np.uint8))
    assert spans.tolist() == [[2, 4], [2, 2], [5, 6], [5, 6]]
    with pytest.raises(ValueError, match=r"advance has shape \(2,\), span.width \(1,\)"):
        decode_spans(np.zeros(2, np.uint8), np.zeros(1, np.uint8))


def test_keys_are_a_function_of_the_id() -> None:
    assert document_key("doc-1") == "bb0e4f49443794d901e8969ff11bd112"
    assert len(document_key("数学")) == 32


def test_tiling() -> None:
    assert tiles_text(np.array([[0, 2], [2, 3]]), 3)
    assert tiles_text(np.empty((0, 2), np.int64), 0)
    assert not tiles_text(np.empty((0, 2), np.int64), 1)
    for broken in ([[1, 3]], [[0, 2]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        assert not tiles_text(np.array(broken), 3)


class TestDamage:
    def test_every_cut_is_noticed(self) -> None:
        sample = encode_document(DOCUMENT)
        for size in range(len(sample)):
            with pytest.raises(DamagedSampleError, match="cut or altered"):
                decode_document(sample[:size])

    def test_bytes_too_many_are_noticed(self) -> None:
        with pytest.raises(DamagedSampleError, match="bytes, its header describes"):
            decode_document(encode_document(DOCUMENT) + b"\0")

    @given(st.data())
    @settings(max_examples=300)
    def test_altered_bytes_raise_nothing_but_dataset_errors(self, data: st.DataObject) -> None:
        sample = bytearray(encode_document(data.draw(documents())))
        generator = random.Random(data.draw(st.integers(0, 1 << 32)))
        for _ in range(data.draw(st.integers(1, 6))):
            sample[generator.randrange(len(sample))] = generator.randrange(256)
        try:
            decode_document(bytes(sample))
        except DatasetError:
            pass

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda h: h.pop("__metadata__"), "no readable safetensors header"),
            (lambda h: h.update(__metadata__=[]), "no readable safetensors header"),
            (lambda h: h["span.width"].update(dtype="I64"), "no readable safetensors header"),
            (lambda h: h["span.width"].update(data_offsets=[0, 1 << 40]), "tensor at bytes 0:1099"),
            (lambda h: h["span.width"].update(data_offsets=[0.0, 4]), "tensor at bytes 0.0:"),
            (lambda h: h["span.width"].update(data_offsets=[-(1 << 80), 4]), "no readable"),
            (lambda h: h["span.width"].update(data_offsets=4), "no readable safetensors header"),
            (lambda h: h["student.input_ids"].update(data_offsets=[0, 15], shape=[3]), "tensor at"),
            (lambda h: h.pop("text"), "bytes, its header describes"),
            (lambda h: h.pop("span.width"), r"lacks or contradicts a field.*span\.width"),
            (lambda h: h["__metadata__"].pop("text_sha256"), r"lacks or .*text_sha256"),
            (lambda h: h["__metadata__"].update(num_text_bytes="x"), "lacks or contradicts"),
            (lambda h: h["__metadata__"].update(num_text_bytes="13"), "add up to 12 of 13 bytes"),
            (
                lambda h: h.update({"teacher.byte_offsets": h.pop("teacher.token_bytes")}),
                r"teacher has 3 ids but offsets \(3,\)",
            ),
        ],
    )
    def test_headers_that_make_no_sense(
        self, change: Callable[[dict[str, Any]], None], message: str
    ) -> None:
        with pytest.raises(DamagedSampleError, match=message):
            decode_document(rewritten(change))

    @pytest.mark.parametrize("data", [b"1", b"[]", b'"x"', b"null", b"[" * 100_000, b"\xff", b"{}"])
    def test_headers_that_are_no_object(self, data: bytes) -> None:
        with pytest.raises(DamagedSampleError, match="no readable safetensors header"):
            decode_document(struct.pack("<Q", len(data)) + data)

    def test_arrays_that_contradict_each_other(self) -> None:
        spans = DOCUMENT.teacher_spans
        with pytest.raises(DamagedSampleError, match=r"3 teacher_spans for 4 .*\"doc-1\""):
            decode_document(encode_document(replace(DOCUMENT, teacher_spans=spans[:3])))
        with pytest.raises(DamagedSampleError, match="spans end 4 exceeds 3 teacher tokens"):
            decode_document(encode_document(replace(DOCUMENT, teacher_spans=spans + 1)))
        with pytest.raises(DamagedSampleError, match="text has 3 bytes, num_text_bytes is 12"):
            decode_document(encode_document(replace(DOCUMENT, text=b"the")))
        short = make_document("d", b"abc", [(0, 1), (2, 3)], [(0, 3)])
        tensors = encode_document(short).replace(b'"num_text_bytes":"3"', b'"num_text_bytes":"2"')
        with pytest.raises(DamagedSampleError, match=r"teacher.token_bytes add up to 3 of 2 bytes"):
            decode_document(tensors)
        loose = make_document("d", b"abc", [(0, 1), (2, 3)], [(0, 1), (2, 3)])
        tensors = encode_document(loose).replace(b'"num_text_bytes":"3"', b'"num_text_bytes":"2"')
        with pytest.raises(DamagedSampleError, match="student byte_offsets end 3 exceeds 2 bytes"):
            decode_document(tensors)

    @pytest.mark.parametrize("version", ["1", "3", "0", "", 2])
    def test_another_version(self, version: object) -> None:
        """Even where it uses what this release does not know."""

        def change(header: dict[str, Any]) -> None:
            header["__metadata__"]["schema_version"] = version
            header["student.input_ids"]["dtype"] = "I64"

        with pytest.raises(SchemaVersionError, match=r"this release reads version 2: install"):
            decode_document(rewritten(change))
