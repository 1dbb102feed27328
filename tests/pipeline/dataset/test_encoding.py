import tarfile
import zlib
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset.encoding import EncodedBatch, encode_batch
from schemas.document import AlignedDocument, Tokens, decode_tensors, document_key
from tests.support.documents import documents, make_document, to_batch
from tests.support.sample_encoder import encode_document


def payloads(encoded: EncodedBatch) -> list[bytes]:
    rows = zip(encoded.payload_offset.tolist(), encoded.payload_bytes.tolist(), strict=True)
    return [encoded.members[start : start + size].tobytes() for start, size in rows]


@given(st.lists(documents(keep_text=True), max_size=5))
@settings(max_examples=100)
def test_a_batch_holds_the_samples_of_the_obvious_encoder(items: list[AlignedDocument]) -> None:
    batch = to_batch(items, [document.text or b"" for document in items])
    assert payloads(encode_batch(batch, keep_text=True)) == [encode_document(d) for d in items]
    bare = [encode_document(replace(document, text=None)) for document in items]
    encoded = encode_batch(batch)
    assert payloads(encoded) == bare
    assert encoded.keys == [document_key(document.document_id) for document in items]
    assert encoded.crc32.tolist() == [zlib.crc32(payload) for payload in bare]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in ("ids", "bytes", "offsets", "advance", "width")
        for value in (1, 255, 256, 65535, 65536, 0xFFFFFFFF)
        if value <= 65536 or field not in ("advance", "width")  # those need as many tokens
    ],
)
def test_values_at_the_edges_of_dtypes(field: str, value: int) -> None:
    document = _edge_document(field, value)
    (payload, _) = payloads(encode_batch(to_batch([document, document], [b"", b""])))
    found, _ = decode_tensors(payload)
    expected, _ = decode_tensors(encode_document(document))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
    widest = max(tensor.dtype.itemsize for tensor in found.values())
    assert widest == (1 if value < 256 else 2 if value < 65536 else 4)


def _edge_document(field: str, value: int) -> AlignedDocument:
    """A document whose largest value in one field is `value`; its text is left out."""
    one_a_byte = [(j, j + 1) for j in range(value)] if field in ("advance", "width") else []
    student, teacher, size = {
        "ids": ([(0, 2)], [(0, 2)], 2),
        "bytes": ([(0, value)], [(0, value)], value),
        "offsets": ([(value - 1, value)], [(0, 1)], 0),
        "advance": ([(0, 1), (value, value + 1)], [*one_a_byte, (value, value + 1)], 0),
        "width": ([(0, value)], one_a_byte, 0),
    }[field]
    ids = [value] if field == "ids" else []
    document = make_document("d", b"", student, teacher, student_ids=ids)
    small = Tokens(np.zeros(len(teacher), np.int64), document.teacher.byte_offsets)
    if field in ("advance", "width"):
        small = replace(small, byte_offsets=np.zeros_like(small.byte_offsets))
        tokens = np.zeros_like(document.student.byte_offsets)
        document = replace(document, student=replace(document.student, byte_offsets=tokens))
    return replace(document, teacher=small, num_text_bytes=size)


def test_members_are_tarfile_s_own() -> None:
    items = [make_document(f"d{n}", b"x" * n, [(0, n)], [(0, n)]) for n in (1, 500, 4000)]
    encoded = encode_batch(to_batch(items, [b"x", b"x" * 500, b"x" * 4000]), keep_text=True)
    expected = BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, payload in zip(encoded.keys, payloads(encoded), strict=True):
            member = tarfile.TarInfo(f"{key}.safetensors")
            member.size = len(payload)
            tar.addfile(member, BytesIO(payload))
    size = encoded.members.nbytes
    assert encoded.members.tobytes() == expected.getvalue()[:size]
    assert set(expected.getvalue()[size:]) == {0}
