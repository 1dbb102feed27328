"""The golden view: what today's code writes, and what every later release must read."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.dataset.views import see_samples
from schemas.document import decode_document, encode_document
from schemas.errors import DamagedSampleError, DamagedShardError, SchemaVersionError
from schemas.view_index import ViewIndex, decode_view_index
from tests.data.make_golden import golden_documents
from tests.data.make_golden_view import BIN, FOLDER, INDEX, golden_view, viewed_documents
from tests.support.documents import assert_same


def read(path: Path, index: ViewIndex, *, num_documents: int = 4) -> list[bytes]:
    own = [encode_document(document) for document in golden_documents(keep_text=False)]
    samples = [(place, memoryview(sample)) for place, sample in enumerate(own[:num_documents])]
    with path.open("rb") as file:
        return [bytes(s) for _, s in see_samples(samples, file, index, "teacher", name=path.name)]


def test_todays_code_writes_these_bytes() -> None:
    assert {name: (FOLDER / name).read_bytes() for name in (BIN, INDEX)} == golden_view()


def test_it_reads_as_the_documents_that_went_in() -> None:
    index = decode_view_index((FOLDER / INDEX).read_bytes())
    assert index.left_out.tolist() == [3]
    *seen, last = map(decode_document, read(FOLDER / BIN, index))
    for document, expected in zip(seen, viewed_documents(), strict=True):
        assert_same(document, expected)
    assert len(last.teacher) == 0
    assert last.teacher_spans.tolist() == [[0, 0]]


def test_damage_names_its_place(tmp_path: Path) -> None:
    index = decode_view_index((FOLDER / INDEX).read_bytes())
    data = bytearray((FOLDER / BIN).read_bytes())
    data[int(index.starts[1]) + 8] ^= 1
    path = tmp_path / BIN
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedSampleError, match=rf'"naïve .*at {index.starts[1]} of {BIN} have'):
        read(path, index)
    assert len(read(path, index, num_documents=1)) == 1
    path.write_bytes(b"another!" + bytes(data[8:]))
    with pytest.raises(DamagedShardError, match=f"{BIN} begins with"):
        read(path, index)


def test_other_versions_and_cut_indices_are_refused() -> None:
    data = (FOLDER / INDEX).read_bytes()
    with pytest.raises(DamagedShardError, match="the view's index is unreadable"):
        decode_view_index(data[:-20])
    later = data.replace(b"vocag.view_version\x18\x011", b"vocag.view_version\x18\x019")
    assert later != data
    with pytest.raises(SchemaVersionError, match="view has schema version '9'"):
        decode_view_index(later)


def test_an_index_of_other_documents_is_refused() -> None:
    index = decode_view_index((FOLDER / INDEX).read_bytes())
    wrong = replace(index, payload_bytes=index.payload_bytes + 1)
    with pytest.raises(DamagedSampleError, match="they were altered or cut"):
        read(FOLDER / BIN, wrong)
