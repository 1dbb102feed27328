"""A dataset as it was first written: today's code reads it, and writes the same."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.dataset.dataset_reading import read_manifest, read_sample
from schemas.document import decode_document, decode_tensors
from schemas.index import decode_index
from schemas.manifest import decode_manifest, encode_manifest
from schemas.removed import decode_removed
from tests.data.make_golden import FOLDER, METADATA, TEXTS, VALUES, golden_documents, golden_files
from tests.support.documents import assert_same, assert_same_index

FILES = golden_files()


def test_the_files_are_those_that_the_script_writes() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert found == set(FILES)


@pytest.mark.parametrize(
    "name", [name for name in FILES if not name.endswith((".parquet", "manifest.json", "000.json"))]
)
def test_bytes_are_the_same(name: str) -> None:
    assert FILES[name] == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".index.parquet")])
def test_indices_hold_the_same(name: str) -> None:
    """Their bytes may change with pyarrow's version, which the file names."""
    assert_same_index(decode_index(FILES[name]), decode_index((FOLDER / name).read_bytes()))


@pytest.mark.parametrize("name", ["manifest.json", "manifests/000.json"])
def test_manifests_are_the_same_but_for_hashes_of_parquet_files(name: str) -> None:
    written = (FOLDER / name).read_bytes()
    pattern = rb'"(fingerprint|sha256|index_sha256|index_num_bytes)": "?\w+"?'
    assert re.sub(pattern, b"", FILES[name]) == re.sub(pattern, b"", written)
    assert encode_manifest(decode_manifest(written, at=name)) == written


def test_metadata_and_quality() -> None:
    index = decode_index((FOLDER / "golden-000000-of-000002.index.parquet").read_bytes())
    columns = [index.metadata[entry.name].to_pylist() for entry in METADATA]
    assert list(zip(*columns, strict=True)) == list(VALUES)
    assert index.num_mapped.tolist() == [4, 3, 85, 0]
    assert index.byte_iou_sum[0] == np.float32(4 / 11 + 7 / 11 + 1 + 1)


def test_what_is_removed() -> None:
    record = read_manifest(str(FOLDER)).removed
    assert record is not None
    removed = decode_removed((FOLDER / record.file).read_bytes())
    assert (removed.shard.tolist(), removed.document.tolist()) == ([1], [2])
    assert (len(removed), removed.of_shard(0).tolist()) == (record.count, [])


def test_shards_are_read_as_the_manifest_lists_them() -> None:
    manifest = read_manifest(str(FOLDER))
    assert len(manifest.shards) == 2
    for shard, keep_text in zip(manifest.shards, (False, True), strict=True):
        index = decode_index((FOLDER / shard.index_file).read_bytes())
        with (FOLDER / shard.file).open("rb") as file:
            found = [
                decode_document(read_sample(file, index, place, shard=shard.file))
                for place in range(len(index))
            ]
        assert len(found) == shard.num_documents == len(TEXTS)
        for document, expected in zip(found, golden_documents(keep_text=keep_text), strict=True):
            assert_same(document, expected)


def test_the_worked_example_of_the_specification(repository: Path) -> None:
    """schemas/README.md shows the golden sample; what it shows must be what is there."""
    text = (repository / "schemas" / "README.md").read_text("utf-8")
    sample = (FOLDER / "sample.safetensors").read_bytes()
    size = int.from_bytes(sample[:8], "little")
    shown = re.search(r"```json sample\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    assert json.loads(shown[1]) == json.loads(sample[8 : 8 + size])
    tensors, _ = decode_tensors(sample)
    rows = re.findall(r"^\| `([a-z_.]+)` \| `(\[[0-9, ]+\])` \| (U\d+) ", text, re.MULTILINE)
    assert {name: json.loads(values) for name, values, _ in rows} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert all(8 * tensors[name].itemsize == int(dtype[1:]) for name, _, dtype in rows)
    dump = re.findall(r"^((?:[0-9a-f]{2} )+) +([a-z_.]+)$", text, re.MULTILINE)
    assert bytes.fromhex("".join(digits for digits, _ in dump)) == sample[8 + size :]
    first = decode_index(FILES["golden-000000-of-000002.index.parquet"])
    assert (first.payload_offset[0], first.payload_bytes[0]) == (512, 637)
    assert f"`{first.key[0]}.safetensors`" in text


def test_the_reader_of_the_specification(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (repository / "schemas" / "README.md").read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(repository)
    exec(compile(code[1], "schemas/README.md", "exec"), {})
    documents = golden_documents(keep_text=False)
    removed = documents[2]
    expected = [
        f"{document.document_id} {document.teacher_spans.tolist()}"
        for document in (*documents, *(each for each in documents if each is not removed))
    ]
    assert capsys.readouterr().out.splitlines() == expected
