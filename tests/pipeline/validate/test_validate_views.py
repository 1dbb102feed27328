"""Validation reads every view of a dataset, and finds each kind of damage in one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.validate.dataset import ValidationReport, validate_dataset
from schemas.manifest import MANIFEST_FILE, Manifest, decode_manifest, encode_manifest
from tests.support.views import add, write_dataset

BIN = "docs-000001-of-000003.view-other.bin"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write_dataset(folder, keep_text=True)
    add(folder, "qwen_like")
    add(folder, "word_pieces", side="student", name="lossy")
    return folder


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dataset"))


def found(report: ValidationReport) -> set[tuple[str, str]]:
    return {(finding.check, finding.shard) for finding in report.findings}


def change_view(folder: Path, **changes: Any) -> None:
    path = folder / MANIFEST_FILE
    manifest: Manifest = decode_manifest(path.read_bytes())
    views = [replace(view, **changes) if view.name == "other" else view for view in manifest.views]
    path.write_bytes(encode_manifest(replace(manifest, views=tuple(views))))


def test_sound_views_are_clean(pristine: Path) -> None:
    report = validate_dataset(str(pristine), with_tokenizers=True)
    assert (report.findings, report.notes) == ((), ())


def test_an_altered_byte_is_found_and_its_document_named(dataset: Path) -> None:
    data = bytearray((dataset / BIN).read_bytes())
    data[60] ^= 4
    (dataset / BIN).write_bytes(bytes(data))
    report = validate_dataset(str(dataset))
    assert found(report) == {("sha256", BIN), ("crc32", BIN)}
    assert any(finding.key for finding in report.findings)
    assert any("statistics of view" in note for note in report.notes)


def test_missing_and_cut_files_are_found(dataset: Path) -> None:
    (dataset / BIN).unlink()
    index = dataset / "docs-000002-of-000003.view-other.parquet"
    index.write_bytes(index.read_bytes()[:-5])
    report = validate_dataset(str(dataset))
    other = "docs-000002-of-000003.view-other.bin"
    assert found(report) == {("files", BIN), ("files", other), ("sha256", other), ("index", other)}


def test_wrong_claims_of_the_manifest_are_found(dataset: Path) -> None:
    manifest = decode_manifest((dataset / MANIFEST_FILE).read_bytes())
    view = next(view for view in manifest.views if view.name == "other")
    files = (replace(view.files[0], num_tokens=view.files[0].num_tokens + 1), *view.files[1:])
    change_view(dataset, files=files)
    assert found(validate_dataset(str(dataset))) == {("counts", files[0].file)}
    change_view(dataset, files=view.files, statistics={**view.statistics, "num_mapped": 1})
    report = validate_dataset(str(dataset))
    assert [finding.check for finding in report.findings] == ["statistics"]
    assert "num_mapped of view other is" in report.findings[0].message
    tokenizer = replace(view.tokenizer, vocab_size=5)
    change_view(dataset, statistics=view.statistics, tokenizer=tokenizer)
    assert {check for check, _ in found(validate_dataset(str(dataset)))} == {"input_ids"}


def test_another_tokenizer_is_found(dataset: Path) -> None:
    (copy,) = (dataset / "tokenizers/views/other").iterdir()
    body = json.loads(copy.read_bytes())
    copy.write_text(json.dumps(body, indent=3))
    assert found(validate_dataset(str(dataset))) == {("sha256", "")}


def test_a_view_that_lacks_shards_is_a_note(dataset: Path) -> None:
    manifest = decode_manifest((dataset / MANIFEST_FILE).read_bytes())
    view = next(view for view in manifest.views if view.name == "other")
    change_view(dataset, files=view.files[:2])
    report = validate_dataset(str(dataset))
    assert not report.findings
    assert any("files for 2 of 3 shards" in note for note in report.notes)
