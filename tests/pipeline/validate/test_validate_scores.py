"""Validation of stored losses: sound ones are clean, and every kind of damage has its finding."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from pipeline.validate import command as validate
from pipeline.validate.dataset import validate_dataset
from schemas.sidecar import (
    decode_score_manifest,
    decode_sidecar,
    encode_score_manifest,
    encode_sidecar,
)
from tests.support.scored_data import retrain, run_score, write_world


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_world(tmp_path_factory.mktemp("scored"))
    run_score(root)
    run_score(root, seq_length=128)
    return root


@pytest.fixture
def world(scored: Path, tmp_path: Path) -> Path:
    shutil.copytree(scored, tmp_path / "world")
    return tmp_path / "world"


def findings_of(world: Path, teacher: str | None = None, seed: int | None = None) -> list[str]:
    report = validate_dataset(str(world / "data"), teacher=teacher, seed=seed)
    assert all(finding.check == "teacher_losses" for finding in report.findings)
    return [finding.message for finding in report.findings]


def rewrite(world: Path, change: Callable[[np.ndarray], object], *, consistently: bool) -> None:
    """Change the stored losses of a shard, and the score manifest's hash along with them."""
    path = min((world / "data").glob("teacher-*.json"))
    manifest = decode_score_manifest(path.read_bytes(), where="")
    record = manifest.sidecars[1]
    file = world / "data" / record.file
    scores = decode_sidecar(file.read_bytes(), where="")
    losses = scores.losses.copy()
    change(losses)
    data = encode_sidecar(replace(scores, losses=losses))
    file.write_bytes(data)
    known = losses[~np.isnan(losses)].astype(np.float64)
    changed = replace(
        record,
        sha256=sha256(data).hexdigest(),
        num_losses=len(known),
        loss_sum=float(known.sum()) if consistently else record.loss_sum,
    )
    sidecars = (manifest.sidecars[0], changed, *manifest.sidecars[2:])
    path.write_bytes(encode_score_manifest(replace(manifest, sidecars=sidecars)))


def test_sound_losses_are_clean_and_agree_when_scored_again(
    scored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert findings_of(scored) == []
    teacher = str(scored / "teacher")
    assert validate.main([str(scored / "data"), "--teacher", teacher]) == validate.CLEAN
    shown = capsys.readouterr().out
    found = re.findall(r"scored (\d+ documents of .*) again on .*, chosen by --seed (\d+)", shown)
    assert len(found) == 2
    assert found[0] == found[1]
    assert "clean:" in shown
    again = ["--seed", found[0][1]]
    assert validate.main([str(scored / "data"), "--teacher", teacher, *again]) == validate.CLEAN
    assert capsys.readouterr().out.count(f"scored {found[0][0]} again") == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "token 7 of document 0 has no loss, and 0 more"),
        (np.inf, "1 losses such as inf are impossible"),
        (0.125, "counts, sum or contexts differ"),
    ],
)
def test_changed_losses_are_found(world: Path, value: float, message: str) -> None:
    rewrite(world, lambda losses: losses.put(7, value), consistently=False)
    (found,) = findings_of(world)
    assert message in found


def test_consistent_forgery_is_found_by_scoring_again(world: Path) -> None:
    def shift(losses: np.ndarray) -> None:
        losses += np.float16(0.5)

    rewrite(world, shift, consistently=True)
    assert findings_of(world) == []
    # One shard is looked at, always the same for a seed; the forged one is one of three.
    teacher = str(world / "teacher")
    found = {seed: findings_of(world, teacher, seed) for seed in range(6)}
    told = [seed for seed in found if found[seed]]
    assert 0 < len(told) < 6
    assert "differ when they are scored again, by up to 0.5" in found[told[0]][0]
    assert findings_of(world, teacher, told[0]) == found[told[0]]


def test_cut_missing_and_foreign_sidecars_are_found(world: Path) -> None:
    first, second, third = sorted((world / "data").glob("*.safetensors"))[:5:2]
    first.write_bytes(first.read_bytes()[:-3])
    whole = second.read_bytes()
    second.unlink()
    third.write_bytes(whole)
    text = "\n".join(findings_of(world))
    assert f"{first.name} is no complete sidecar" in text
    assert f"{second.name} can't be read" in text
    assert f"{third.name}: another tar was scored" in text


def test_scores_of_other_data_and_altered_manifests_are_found(world: Path) -> None:
    path = min((world / "data").glob("teacher-*.json"))
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"dataset": "0" * 64}))
    assert "was made for dataset 0000000000000000" in findings_of(world)[0]
    path.write_text("{}")
    assert "is no vocag.teacher_losses manifest" in findings_of(world)[0]


def test_another_teacher_can_t_score_again(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrain(world / "teacher")
    arguments = [str(world / "data"), "--teacher", str(world / "teacher")]
    assert validate.main(arguments) == validate.CANNOT_RUN
    assert "none of the 2 scores" in capsys.readouterr().err
