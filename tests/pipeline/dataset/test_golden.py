"""Format version 1 as it was first written: today's code writes the same bytes and reads them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.dataset.reading import read_manifest, read_samples
from schemas.document import decode_document, decode_tensors
from schemas.index import decode_index
from schemas.manifest import encode_manifest
from tests.data.make_golden import FOLDER, TEXTS, golden_documents, golden_files
from tests.support.documents import assert_same, assert_same_index

FILES = golden_files()


def test_the_files_are_those_that_the_script_writes() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert found == set(FILES)


@pytest.mark.parametrize(
    "name", [name for name in FILES if not name.endswith((".parquet", "manifest.json"))]
)
def test_bytes_are_the_same(name: str) -> None:
    assert FILES[name] == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".parquet")])
def test_indices_hold_the_same(name: str) -> None:
    """Their bytes may change with pyarrow's version, which the file names."""
    assert_same_index(decode_index(FILES[name]), decode_index((FOLDER / name).read_bytes()))


def test_the_manifest_is_the_same_but_for_the_indices_bytes_and_a_later_count() -> None:
    """Over-wide tokens are counted since; a manifest without the count is read as it is."""
    written = (FOLDER / "manifest.json").read_bytes()
    assert b"over_wide" not in written
    pattern = (
        rb'"(fingerprint|index_sha256|index_num_bytes)": "?\w+"?'
        rb'|\s+"num_(student|teacher)_over_wide": \d+,'
    )
    assert re.sub(pattern, b"", FILES["manifest.json"]) == re.sub(pattern, b"", written)
    assert encode_manifest(read_manifest(str(FOLDER))) == written


def test_shards_are_read_as_the_manifest_lists_them() -> None:
    manifest = read_manifest(str(FOLDER))
    assert len(manifest.shards) == 2
    for shard, keep_text in zip(manifest.shards, (False, True), strict=True):
        index = decode_index((FOLDER / shard.index_file).read_bytes())
        with (FOLDER / shard.file).open("rb") as file:
            found = [decode_document(p) for _, p in read_samples(file, index, shard=shard.file)]
        assert len(found) == shard.num_documents == len(TEXTS)
        for document, expected in zip(found, golden_documents(keep_text=keep_text), strict=True):
            assert_same(document, expected)


def test_golden_documents_have_every_case() -> None:
    documents = golden_documents(keep_text=False)
    tensors = [decode_tensors(FILES["sample.safetensors"])[0]]
    names = {name for own in tensors for name in own}
    assert names > {"student.token_bytes", "teacher.token_bytes"}
    assert {tensor.dtype.itemsize for tensor in tensors[0].values()} == {1, 2, 4}
    tensors_with_text, _ = decode_tensors(FILES["sample-with-text.safetensors"])
    assert {"text", "teacher.byte_offsets"} <= set(tensors_with_text)
    assert any(np.any(d.teacher_spans[:, 0] == d.teacher_spans[:, 1]) for d in documents)
    assert any(len(document.teacher) == 0 for document in documents)
    index = decode_index(FILES["golden-000000-of-000002.index.parquet"])
    assert len(index.cut_student) > 2


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
    expected = [
        f"{document.document_id} {document.teacher_spans.tolist()}"
        for document in golden_documents(keep_text=False) * 2
    ]
    assert capsys.readouterr().out.splitlines() == expected
