"""Sidecars and score manifests: equal bytes for equal scores, and nothing altered is read."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load

from schemas.distribution_rule import DistributionRule
from schemas.errors import DamagedShardError, DatasetError, SchemaVersionError
from schemas.sidecar import (
    LARGEST_LOSS,
    EngineRecord,
    ScoreManifest,
    ShardLosses,
    SidecarRecord,
    TeacherRule,
    decode_score_manifest,
    decode_sidecar,
    encode_score_manifest,
    encode_sidecar,
    score_manifest_name,
    sidecar_name,
    to_fp16,
)
from tests.data.make_golden_scores import DISTRIBUTIONS, FOLDER, SHARD, golden_scores

RULE = TeacherRule("a" * 64, "float32", "b" * 64, {"seq_length": 64, "first_token_id": None})
RECORD = SidecarRecord("s.safetensors", 9, "c" * 64, "s.tar", 3, 2, 4.5, 1, "d" * 64)
MANIFEST = ScoreManifest("e" * 64, RULE, "models/teacher", (RECORD,))


def example() -> ShardLosses:
    losses = np.array([np.nan, 2.5, 0.125, np.nan, 65504.0], np.float16)
    return ShardLosses(losses, np.array([0, 3, 3, 5], np.int64), "f" * 64, "0" * 64)


def test_a_sidecar_keeps_every_bit_and_is_plain_safetensors() -> None:
    scores = example()
    data = encode_sidecar(scores)
    decoded = decode_sidecar(memoryview(data), at="x")
    assert decoded.losses.tobytes() == scores.losses.tobytes()
    assert decoded.starts.tolist() == [0, 3, 3, 5]
    assert decoded.starts.dtype == np.int64
    assert (decoded.teacher, decoded.shard_sha256) == ("f" * 64, "0" * 64)
    tensors = load(data)
    assert tensors["losses"].dtype == np.float16
    assert tensors["starts"].dtype == np.uint32
    assert encode_sidecar(scores) == data


def test_losses_beyond_fp16_are_the_largest_number_and_nan_stays() -> None:
    losses = np.array([0, 1e-9, 2.4999, 65504, 65519.9, 7e4, np.nan], np.float32)
    stored = to_fp16(losses)
    assert stored.dtype == np.float16
    assert stored[3:6].tolist() == [LARGEST_LOSS] * 3 == [65504.0] * 3
    assert np.isnan(stored[6])
    assert stored[0] == 0
    assert abs(float(stored[2]) - 2.4999) <= 2.4999 * 2**-11


def test_every_cut_and_every_altered_header_is_noticed() -> None:
    data = encode_sidecar(example())
    for length in range(len(data)):
        with pytest.raises(DamagedShardError, match=r"x isn't a complete sidecar"):
            decode_sidecar(data[:length], at="x")
    for old, new in [(b'"F16"', b'"F32"'), (b"[5]", b"[4]"), (b"losses", b"lesses")]:
        assert old in data
        with pytest.raises(DamagedShardError, match=r"delete it and run vocag score again"):
            decode_sidecar(data.replace(old, new), at="x")
    bad = replace(example(), starts=np.array([0, 3, 2, 5]))
    with pytest.raises(DamagedShardError, match=r"starts don't divide its 5 losses"):
        decode_sidecar(encode_sidecar(bad), at="x")


def test_another_version_is_refused() -> None:
    data = encode_sidecar(example()).replace(b'sidecar_version\\": 1', b'sidecar_version\\": 2')
    with pytest.raises(SchemaVersionError, match=r"version 2; .* version 1: .*vocag score"):
        decode_sidecar(data, at="x")
    body = json.loads(encode_score_manifest(MANIFEST)) | {"schema_version": 2}
    with pytest.raises(SchemaVersionError, match=r"vocag score again"):
        decode_score_manifest(json.dumps(body).encode(), at="x")


def test_altered_score_manifests_are_refused() -> None:
    data = encode_score_manifest(MANIFEST)
    assert decode_score_manifest(data, at="x") == MANIFEST
    body = json.loads(data)
    for field in ("dataset", "rule", "sidecars", "teacher"):
        less = {name: value for name, value in body.items() if name != field}
        with pytest.raises(DatasetError, match=r"x isn't a complete score manifest"):
            decode_score_manifest(json.dumps(less).encode(), at="x")
    other = json.dumps(body | {"rule": body["rule"] | {"dtype": "bfloat16"}}).encode()
    with pytest.raises(DatasetError, match=r"its rule gives .*it was altered"):
        decode_score_manifest(other, at="x")
    with pytest.raises(DatasetError, match=r"isn't a vocag.teacher_losses manifest"):
        decode_score_manifest(b'{"schema": "vocag.aligned_dataset"}', at="x")


@pytest.mark.parametrize("distributions", DISTRIBUTIONS)
def test_golden_scores_are_read_and_written_as_they_first_were(
    distributions: DistributionRule | None,
) -> None:
    """Version 1: these bytes must be readable as long as the version is."""
    scores, manifest = golden_scores(distributions)
    name = sidecar_name(SHARD, scores.teacher)
    data = (FOLDER / name).read_bytes()
    assert data == encode_sidecar(scores)
    assert decode_sidecar(data, at=name).losses.tobytes() == scores.losses.tobytes()
    written = (FOLDER / score_manifest_name(scores.teacher)).read_bytes()
    assert written == encode_score_manifest(manifest)
    assert decode_score_manifest(written, at="x") == manifest


def test_each_part_of_the_rule_changes_the_fingerprint() -> None:
    # What releases without engines wrote; stored losses are found by it.
    assert RULE.fingerprint == "a58467e6c4048d6318c196988e1b49e36b4e03c1a818d788e651a0326163b98d"
    engine = EngineRecord("openai", "vllm", "0.20.2", "fp8", "qwen3-moe", "name")
    changes = [
        *(("weights_sha256", "9" * 64), ("dtype", "bfloat16"), ("tokenizer_sha256", "9" * 64)),
        *(("context", {"seq_length": 65, "first_token_id": None}), ("engine", engine)),
        *(("where", "score > 0.5"), ("distributions", DistributionRule(16, 1.0, 500, "uint8"))),
    ]
    of_engines = [
        *(("name", "other"), ("server", ""), ("version", "0.21"), ("quantization", "none")),
        *(("model", "other"), ("weights_of", "files")),
    ]
    rules = [
        RULE,
        *(replace(RULE, **{name: value}) for name, value in changes),
        *(replace(RULE, engine=replace(engine, **{name: value})) for name, value in of_engines),
    ]
    prints = {rule.fingerprint for rule in rules}
    assert len(prints) == len(rules)
    assert len({sidecar_name("a.tar", p) for p in prints}) == len(rules)
    assert len({score_manifest_name(p) for p in prints}) == len(rules)


def test_engines_are_kept_and_unknown_fields_refused() -> None:
    engine = EngineRecord("openai", "vllm", "0.20.2", "fp8", "qwen3-moe", "name")
    served = replace(MANIFEST, rule=replace(RULE, engine=engine))
    assert decode_score_manifest(encode_score_manifest(served), at="x") == served
    body = json.loads(encode_score_manifest(served))
    body["rule"]["engine"]["kv_cache"] = "fp8"
    with pytest.raises(DatasetError, match=r"'engine.kv_cache'.*, not \["):
        decode_score_manifest(json.dumps(body).encode(), at="x")
    top = replace(MANIFEST, rule=replace(RULE, distributions=DISTRIBUTIONS[1]))
    body = json.loads(encode_score_manifest(top))
    assert decode_score_manifest(json.dumps(body).encode(), at="x") == top
    body["rule"]["distributions"]["temperature"] = 2
    with pytest.raises(DatasetError, match=r"'distributions.temperature'.*, not \["):
        decode_score_manifest(json.dumps(body).encode(), at="x")
