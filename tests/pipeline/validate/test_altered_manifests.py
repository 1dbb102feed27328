"""Whatever a manifest's fields are replaced by, validation reports it and never breaks."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.dataset.dataset_reading import read_manifest
from pipeline.validate.dataset_checks import validate_dataset
from schemas.errors import DatasetError, SchemaVersionError
from schemas.manifest import MANIFEST_FILE, decode_manifest, encode_manifest
from tests.support.datasets import build_dataset, make_texts

VALUES = [None, True, -1, 1 << 70, 1.5, "../x", [[]], {"a": {}}, "\ud800"]
GOLDEN = Path(__file__).parents[2] / "data/golden_v2"

Step = str | int


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    build_dataset(tmp_path / "one", make_texts(1), num_shards=1, metadata={"source": "string"},
                  values=lambda _: ("web",))  # fmt: skip
    return tmp_path / "one"


def places(value: Any, at: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    """Every place in a JSON value; of a list's elements the first."""
    yield at
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*at, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def alter(body: Any, at: tuple[Step, ...], value: Any) -> Any:
    if not at:
        return value
    altered = copy(body)
    altered[at[0]] = alter(body[at[0]], at[1:], value)
    return altered


def alterations(body: Any) -> Iterator[tuple[tuple[Step, ...], Any, Any]]:
    for at in places(body):
        for value in VALUES:
            altered = alter(body, at, value)
            if altered != body:
                yield at, value, altered


def validate_altered(folder: Path, *, with_tokenizers: bool) -> list[str]:
    """Return the places whose alteration was not found."""
    path = folder / MANIFEST_FILE
    body = json.loads(path.read_bytes())
    missed = []
    for at, value, altered in alterations(body):
        path.write_text(json.dumps(altered))
        try:
            report = validate_dataset(str(folder), with_tokenizers=with_tokenizers)
        except SchemaVersionError:
            assert not at or at == ("schema_version",), (at, value)
            continue
        if not report.findings:
            missed.append(".".join(map(str, at)))
    return sorted(set(missed))


def test_every_field_of_another_type(dataset: Path) -> None:
    """What is not found is free text, or may be anything."""
    missed = validate_altered(dataset, with_tokenizers=True)
    assert set(missed) <= {
        *("configuration", "configuration.keep_text", "name", "student.source", "teacher.source")
    }


def test_every_field_of_a_manifest_with_a_digest(dataset: Path) -> None:
    """Even the tokens around a text, which nothing else says: all but the digest's own absence."""
    manifest = read_manifest(str(dataset))
    student, teacher = (
        replace(record, convention=record.around_text)
        for record in (manifest.student, manifest.teacher)
    )
    body = json.loads(encode_manifest(replace(manifest, student=student, teacher=teacher)))
    assert decode_manifest(json.dumps(body).encode()).student == student
    accepted = []
    for at, _, altered in alterations(body):
        with suppress(DatasetError):
            decode_manifest(json.dumps(altered).encode())
            accepted.append(at)
    assert accepted == [("digest",)]


@pytest.mark.slow
def test_of_a_dataset_that_grew(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "golden")
    assert validate_altered(tmp_path / "golden", with_tokenizers=False) == []


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 5, "", "NaN", "1" * 10_000])
def test_no_manifest_at_all(dataset: Path, text: str) -> None:
    (dataset / MANIFEST_FILE).write_text(text)
    report = validate_dataset(str(dataset), with_tokenizers=True)
    assert {finding.check for finding in report.findings} == {"manifest"}
    assert report.notes == ("shards were not checked: the manifest does not say what they are",)
