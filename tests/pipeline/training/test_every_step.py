"""One small world, restored at every step: the run is what it is without (as grain tests do)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.methods.method import Method
from pipeline.packing.state import StreamMismatchError
from pipeline.scoring.teaching import Teaching
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from schemas.errors import DatasetError
from schemas.sidecar import ScoreManifest, encode_score_manifest, score_manifest_name
from tests.support.guided_trainers import data_of, logged, trainer_of
from tests.support.runs import read_log, require_equal_weights
from tests.support.scored_data import scores_of, train_config

STEPS = 4
METHOD = Method("random", unmapped="mean")  # whose draws are the run's, too


def losses(output: Path) -> list[float]:
    return [step["loss"] for step in read_log(output)]


def test_vocag_train_that_is_started_again_at_every_step(world: Path, tmp_path: Path) -> None:
    whole = train_config(world, tmp_path / "whole", method=METHOD, num_steps=STEPS)
    again = replace(whole, output=tmp_path / "again")
    train(whole)
    for step in range(1, STEPS + 1):
        train(replace(again, exit_after=step))
    assert losses(again.output) == losses(whole.output)
    require_equal_weights(again.output, whole.output)


def test_a_run_continues_when_another_teacher_has_scored_its_data(
    copied: Path, tmp_path: Path
) -> None:
    """The name of the only losses then means none: theirs is the beginning of a fingerprint."""
    whole = train_config(copied, tmp_path / "whole", num_steps=2, stored_losses=("",))
    again = replace(whole, output=tmp_path / "again")
    train(whole)
    train(replace(again, exit_after=1))
    scores = scores_of(copied)
    other = replace(scores, rule=replace(scores.rule, weights_sha256="0" * 64))
    path = copied / "data" / score_manifest_name(other.rule.fingerprint)
    path.write_bytes(encode_score_manifest(other))
    with pytest.raises(DatasetError, match='2 teachers are named ""'):
        train(again)

    def named(manifest: ScoreManifest) -> TrainConfig:
        return replace(again, teaching=Teaching(stored_losses=(manifest.rule.fingerprint[:8],)))

    with pytest.raises(StreamMismatchError, match=r"made with teachers .* by their first digits"):
        train(named(other))
    train(named(scores))
    require_equal_weights(again.output, whole.output)


def test_a_trainer_of_transformers_restored_from_every_step(world: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"settings": {"save_steps": 1, "max_steps": STEPS}, "method": METHOD}
    given["data"] = data_of(world, stored_losses=None)
    whole = trainer_of(world, tmp_path / "run", **given)
    whole.train()
    for step in range(1, STEPS):
        again = trainer_of(world, tmp_path / "run", **given)
        again.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{step}"))
        assert logged(again)[-1] == logged(whole)[-1]
        weights = dict(whole.model.named_parameters())
        assert all(torch.equal(weights[name], p) for name, p in again.model.named_parameters())


@pytest.mark.parametrize("trainer", ["vocag train", "transformers"])
def test_a_method_of_ones_own_is_one_file(world: Path, tmp_path: Path, trainer: str) -> None:
    """It is named as a module, and learns: other weights than the paper's method gives."""
    own = Method("tests.support.own_method")
    found = []
    for method in (own, Method("teacher")):
        if trainer == "transformers":
            settings = {"max_steps": 2, "save_strategy": "no"}
            run = trainer_of(world, tmp_path, settings=settings, method=method)
            run.train()
            found.append(logged(run))
        else:
            output = tmp_path / method.name
            train(train_config(world, output, method=method, stored_losses="", num_steps=2))
            found.append(losses(output))
    assert found[0] != found[1]
    assert all(0 < weighed < plain for weighed, plain in zip(*found, strict=True))
