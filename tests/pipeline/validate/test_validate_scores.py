"""Validation of stored losses: sound ones are clean, and every kind of damage has its finding."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from pipeline.validate import command as validate
from pipeline.validate.dataset_checks import validate_dataset
from schemas.document_score_table import document_scores_name
from schemas.sidecar import (
    decode_score_manifest,
    decode_sidecar,
    encode_score_manifest,
    encode_sidecar,
)
from tests.support.scored_data import retrain


def findings_of(world: Path, teacher: Path | None = None) -> list[str]:
    report = validate_dataset(str(world / "data"), teacher=teacher and str(teacher))
    assert all(finding.check == "teacher_losses" for finding in report.findings)
    return [finding.message for finding in report.findings]


def rewrite(world: Path, shard: int, change: Callable[[np.ndarray], object], **claims: int) -> None:
    """Change a shard's stored losses, and what the score manifest says of them but for `claims`."""
    path = min((world / "data").glob("teacher-*.json"))
    manifest = decode_score_manifest(path.read_bytes(), at="")
    record = manifest.sidecars[shard]
    file = world / "data" / record.file
    scores = decode_sidecar(file.read_bytes(), at="")
    losses = scores.losses.copy()
    change(losses)
    data = encode_sidecar(replace(scores, losses=losses))
    file.write_bytes(data)
    (world / "data" / document_scores_name(record.file)).unlink(missing_ok=True)  # it would tell
    known = losses[~np.isnan(losses)].astype(np.float64)
    told = {"num_losses": len(known), "loss_sum": float(known.sum())} | claims
    sidecars = list(manifest.sidecars)
    sidecars[shard] = replace(record, sha256=sha256(data).hexdigest(), **told)
    path.write_bytes(encode_score_manifest(replace(manifest, sidecars=tuple(sidecars))))


def test_sound_losses_are_clean_and_agree_when_scored_again(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(world / "data"), "--teacher", str(world / "teacher")]
    assert validate.main(arguments) == validate.CLEAN
    shown = capsys.readouterr().out
    assert len(re.findall(r"scored \d+ documents of .* again on ", shown)) == 1
    assert "clean:" in shown


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "token 7 of document 0 has no loss, and 0 more"),
        (np.inf, "1 losses such as inf are impossible"),
        (0.125, "counts, sum or contexts differ"),
    ],
)
def test_changed_losses_are_found(copied: Path, value: float, message: str) -> None:
    rewrite(copied, 1, lambda losses: losses.put(7, value), loss_sum=1)
    (found,) = findings_of(copied)
    assert message in found


def test_consistent_forgery_is_found_by_scoring_again(copied: Path) -> None:
    for shard in range(3):
        rewrite(copied, shard, lambda losses: np.add(losses, np.float16(0.5), out=losses))
    assert findings_of(copied) == []
    (found,) = findings_of(copied, copied / "teacher")
    assert "differ when they are scored again, by up to 0.5" in found


def test_cut_missing_and_foreign_sidecars_are_found(copied: Path) -> None:
    first, second, third = sorted((copied / "data").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-3])
    whole = second.read_bytes()
    second.unlink()
    third.write_bytes(whole)
    text = "\n".join(findings_of(copied))
    assert f"{first.name} isn't a complete sidecar" in text
    assert f"{second.name} can't be read: there is no such file; run vocag score again" in text
    assert f"{third.name}: a different tar was scored" in text


def test_a_missing_table_is_a_note(copied: Path) -> None:
    table = min((copied / "data").glob("*.documents.parquet"))
    table.unlink()
    (note,) = validate_dataset(str(copied / "data")).notes
    assert note.startswith(f"1 table of documents' scores, such as {table.name}: missing or")


def test_scores_of_other_data_and_altered_manifests_are_found(copied: Path) -> None:
    (path,) = (copied / "data").glob("teacher-*.json")
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"dataset": "0" * 64}))
    assert "was made for dataset 0000000000000000" in findings_of(copied)[0]
    path.write_text("{}")
    assert "isn't a vocag.teacher_losses manifest" in findings_of(copied)[0]


def test_another_teacher_can_t_score_again(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retrain(copied / "teacher")
    arguments = [str(copied / "data"), "--teacher", str(copied / "teacher")]
    assert validate.main(arguments) == validate.CANNOT_RUN
    assert "none of the 1 scores" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("teacher", "scored", "told", "hint"),
    [
        ("nowhere", True, "no such folder", "hint: "),
        (
            "teacher",
            False,
            "nothing has scored",
            "hint: vocag score {0}/data --teacher {0}/teacher",
        ),
    ],
)
def test_a_teacher_of_no_use_is_told_before_any_shard_is_read(
    copied: Path,
    teacher: str,
    scored: bool,
    told: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in (copied / "data").glob("*.tar" if scored else "*teacher-*"):
        path.unlink()  # a missing tar would be a finding
    arguments = [str(copied / "data"), "--teacher", str(copied / teacher)]
    assert validate.main(arguments) == validate.CANNOT_RUN
    message, *_, last = capsys.readouterr().err.splitlines()
    assert told in message
    assert last.startswith(hint.format(copied))


def test_sidecars_that_no_score_manifest_lists_are_named(copied: Path) -> None:
    manifest = min((copied / "data").glob("teacher-*.json"))
    num_sidecars = len(list((copied / "data").glob("*.teacher-*.safetensors")))
    manifest.unlink()
    (message,) = findings_of(copied)
    assert message.startswith(f"{num_sidecars} sidecars, such as docs-000000-of-")
    assert "are in no score manifest" in message
