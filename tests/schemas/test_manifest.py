import json
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

import pytest

from schemas.errors import DatasetError, ForeignTokenizerError, SchemaVersionError
from schemas.manifest import (
    ConventionRecord,
    GenerationRecord,
    Manifest,
    MetadataColumn,
    RemovedRecord,
    decode_manifest,
    encode_manifest,
)
from tests.support.manifests import MANIFEST, SHARDS, STUDENT, TEACHER


def rewritten(change: Callable[[dict[str, Any]], Any]) -> bytes:
    body = json.loads(encode_manifest(MANIFEST))
    change(body)
    return json.dumps(body).encode()


def test_round_trip() -> None:
    data = encode_manifest(MANIFEST)
    assert decode_manifest(data) == MANIFEST
    assert encode_manifest(decode_manifest(data)) == data
    empty = replace(MANIFEST, shards=())
    assert decode_manifest(encode_manifest(empty)) == empty


AROUND = ConventionRecord(1, None, 2)
WITH_CONVENTIONS = replace(
    MANIFEST,
    student=replace(STUDENT, convention=AROUND),
    teacher=replace(TEACHER, convention=AROUND),
)


def test_the_digest_covers_what_no_other_hash_does() -> None:
    """And fields that are not known yet; not how it is laid out."""
    data = encode_manifest(WITH_CONVENTIONS)
    assert decode_manifest(data) == WITH_CONVENTIONS
    body = json.loads(data)
    assert decode_manifest(json.dumps(body).encode()) == WITH_CONVENTIONS
    told = {name: value for name, value in body.items() if name not in ("shards", "digest")}
    assert body["digest"] == sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    altered = json.dumps(body | {"later": 1}).encode()
    with pytest.raises(DatasetError, match="is not that of its other fields: one was altered"):
        decode_manifest(altered)
    assert "digest" not in json.loads(encode_manifest(MANIFEST))


@pytest.mark.parametrize("name", ["bos_token_id", "first_token_id", "end_token_id"])
def test_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    def change(body: dict[str, Any]) -> None:
        student = body["student"]
        (student if name in student else student["convention"])[name] = 32000

    body = json.loads(encode_manifest(WITH_CONVENTIONS))
    change(body)
    with pytest.raises(DatasetError, match=rf"{name} 32000 is outside the vocabulary"):
        decode_manifest(json.dumps(body).encode())


def test_a_person_can_read_it() -> None:
    text = encode_manifest(MANIFEST).decode()
    assert '"naïve": "数"' in text
    assert text.endswith("}\n")
    body = json.loads(text)
    assert body["schema"] == "vocag.aligned_dataset"
    assert body["schema_version"] == 2
    assert body["totals"] == {
        "num_documents": 7,
        "num_bytes": 4096,
        "num_text_bytes": 600,
        "num_student_tokens": 160,
        "num_teacher_tokens": 140,
    }


@pytest.mark.parametrize(
    "changed",
    [
        replace(MANIFEST, student=replace(STUDENT, sha256="e" * 64)),
        replace(MANIFEST, teacher=replace(TEACHER, special_strings="honoured")),
        replace(MANIFEST, shards=SHARDS[:1]),
        replace(MANIFEST, shards=SHARDS[::-1]),
        replace(MANIFEST, removed=RemovedRecord("removed-g001.parquet", "f" * 64, 1)),
        replace(MANIFEST, shards=(SHARDS[0], replace(SHARDS[1], sha256="e" * 64))),
        replace(MANIFEST, shards=(SHARDS[0], replace(SHARDS[1], index_sha256="e" * 64))),
    ],
)
def test_the_fingerprint_names_the_content(changed: Manifest) -> None:
    assert changed.fingerprint != MANIFEST.fingerprint


def test_the_fingerprint_is_not_moved_by_where_things_came_from() -> None:
    elsewhere = replace(
        MANIFEST,
        student=replace(STUDENT, source="a/copy"),
        statistics={},
        configuration={"input": ["other"]},
        generation=3,
        generations=(GenerationRecord(0, "manifests/000.json", "e" * 64),),
    )
    assert elsewhere.fingerprint == MANIFEST.fingerprint
    assert MANIFEST.fingerprint == (
        "8ca4b0b0d29c0d6fcd46010bae1b9f9e8bab3dba7d52d0c3552739853dc9278f"
    )


def test_what_a_dataset_that_grows_adds() -> None:
    grown = replace(
        MANIFEST,
        metadata=(MetadataColumn("source", "string"), MetadataColumn("meta.score", "float64")),
        generation=1,
        generations=(GenerationRecord(0, "manifests/000.json", "e" * 64),),
        removed=RemovedRecord("removed-g001.parquet", "f" * 64, 1),
    )
    assert decode_manifest(encode_manifest(grown)) == grown
    wrong = [{"name": "source", "type": "decimal"}]
    with pytest.raises(DatasetError, match=r"decimal.*`\$\.metadata\[0\]\.type`"):
        decode_manifest(rewritten(lambda body: body.update(metadata=wrong)))
    outside = [{"number": 0, "file": "../m.json", "fingerprint": "e" * 64}]
    with pytest.raises(DatasetError, match=r"inside the dataset.*generations\[0\]\.file"):
        decode_manifest(rewritten(lambda body: body.update(generations=outside)))


def test_every_cut_is_noticed() -> None:
    data = encode_manifest(MANIFEST)
    for size in range(0, len(data) - 2, 17):
        with pytest.raises(DatasetError, match=r"lost/manifest\.json isn't a complete manifest"):
            decode_manifest(data[:size], at="lost/manifest.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["shards"][0].update(sha256="0" * 63 + "1"), "fingerprint .* does not follow"),
        (lambda b: b["shards"][0].update(num_documents=4), "totals .* does not follow"),
        (lambda b: b["totals"].update(num_bytes=1), "totals .* does not follow"),
        (lambda b: b.update(fingerprint="0" * 64), "fingerprint 0000"),
        (lambda b: b.pop("totals"), "missing required field `totals`"),
        (lambda b: b["student"].pop("adds_bos"), r"`adds_bos` - at `\$\.student`"),
        (lambda b: b["shards"][0].update(num_bytes=True), r"`\$\.shards\[0\]\.num_bytes`"),
        (lambda b: b["shards"][1].update(num_bytes=-1), r">= 0 - at `\$\.shards\[1\]\.num_bytes`"),
        (lambda b: b["shards"][1].update(sha256="C" * 64), "Expected a SHA-256, 64 lower-case"),
        (lambda b: b.update(fingerprint="0" * 64 + "\n"), "length <= 64"),
        (lambda b: b["student"].update(special_strings="raw"), r"special_strings`"),
        (lambda b: b["dead_letters"]["by_reason"].update(x="1"), r"\$\.dead_letters\.by_reason\["),
        (lambda b: b["shards"][0].update(file="/etc/passwd"), r"inside the dataset.*\[0\]\.file`"),
        (lambda b: b["student"].update(file="../x"), r"inside the dataset.*\$\.student\.file`"),
        (lambda b: b["shards"][0].update(index_file=""), "inside the dataset"),
        (lambda b: b.update(schema="other"), "isn't a vocag.aligned_dataset manifest; name"),
    ],
)
def test_alterations_are_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        decode_manifest(rewritten(change))


DEEP = b'{"schema": "vocag.aligned_dataset", "schema_version": 2, "a": ' + b"[" * 100_000
NOT_UTF8 = encode_manifest(MANIFEST).replace("naïve".encode(), b"na\xefve")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"1", b"null", b"\xff", b"[" * 100_000, DEEP, NOT_UTF8]
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(DatasetError, match="isn't a complete manifest"):
        decode_manifest(data)


@pytest.mark.parametrize("version", [0, 1, 4, True, "2", None])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(SchemaVersionError, match=r"reads version 2: install the matching"):
        decode_manifest(rewritten(lambda body: body.update(schema_version=version)))


def test_foreign_tokenizers_are_refused() -> None:
    MANIFEST.require_tokenizers()
    MANIFEST.require_tokenizers(student_sha256="a" * 64, teacher_sha256="b" * 64)
    swapped = r"student tokenizer b{16}… is not the dataset's, but its teacher's: it was made "
    with pytest.raises(ForeignTokenizerError, match=swapped + r'with "owner/student" \(a{16}…\)'):
        MANIFEST.require_tokenizers(student_sha256="b" * 64)
    with pytest.raises(ForeignTokenizerError, match=r"teacher tokenizer c{16}… is not the data"):
        MANIFEST.require_tokenizers(student_sha256="a" * 64, teacher_sha256="c" * 64)


def test_conventions_are_kept_and_may_be_absent() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)).student.convention is None
    chosen = ConventionRecord(None, 5, 7)
    manifest = replace(MANIFEST, teacher=replace(MANIFEST.teacher, convention=chosen))
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.fingerprint == MANIFEST.fingerprint
    wrong = {**asdict(chosen), "first_token_id": "<s>"}
    with pytest.raises(DatasetError, match=r"`\$\.student\.convention\.first_token_id`"):
        decode_manifest(rewritten(lambda body: body["student"].update(convention=wrong)))
