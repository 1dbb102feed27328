"""Losses of a teacher on a view: those on a fresh alignment, and nobody else's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beam_jobs.views.command import add_view
from beam_jobs.views.options import ViewRequest
from pipeline.dataset.files import open_dataset
from pipeline.scoring.stored_losses import find_scores, list_scores
from pipeline.streaming import StreamConfig
from pipeline.streaming.rows import AlignedRows
from pipeline.validate.dataset import validate_dataset
from schemas.errors import DatasetError, ForeignLossesError
from schemas.manifest import (
    MANIFEST_FILE,
    decode_manifest,
    encode_manifest,
    kept_manifest_file,
    next_generation,
)
from schemas.sidecar import decode_sidecar
from schemas.view_file import Side
from tests.support.scored_data import SEQ_LENGTH, run_score, sidecars, write_viewed_world


def losses_of(folder: Path) -> np.ndarray:
    (scores,) = list_scores(str(folder))
    files = [folder / record.file for record in scores.manifest.sidecars]
    parts = [decode_sidecar(file.read_bytes(), where="").losses for file in files]
    return np.concatenate(parts)


def rows_of(root: Path, name: str, **more: object) -> AlignedRows:
    losses = str(root / "teacher")
    config = StreamConfig(
        path=str(root / name),
        seq_length=SEQ_LENGTH,
        stored_losses=losses,
        **more,  # type: ignore[arg-type]
    )
    return AlignedRows(config)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_losses_through_a_view_are_those_of_a_fresh_alignment(tmp_path: Path, side: Side) -> None:
    write_viewed_world(tmp_path, side)
    (tmp_path / "fresh").rename(tmp_path / "fresh_data")
    run_score(tmp_path, "--view", "other")
    found = losses_of(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "viewed")
    (tmp_path / "fresh_data").rename(tmp_path / "data")
    run_score(tmp_path)
    np.testing.assert_array_equal(found, losses_of(tmp_path / "data"))
    viewed = rows_of(tmp_path, "viewed", view="other")
    assert viewed.teacher_rule is not None
    assert viewed.teacher_rule.view == open_dataset(tmp_path / "viewed").manifest.views[0].identity
    assert np.isfinite(viewed[0]["teacher_losses"].numpy()).any()


def test_losses_of_one_view_serve_no_other(tmp_path: Path) -> None:
    """The same teacher has scored the dataset as it was aligned: its tokens are the same."""
    write_viewed_world(tmp_path, "student")
    run_score(tmp_path)
    before = sidecars(tmp_path)
    with pytest.raises(DatasetError, match=r"no scores are of teacher .* through view"):
        rows_of(tmp_path, "data", view="other")
    run_score(tmp_path, "--view", "other")
    assert sidecars(tmp_path).items() >= before.items(), "nothing is overwritten"
    assert len(list_scores(str(tmp_path / "data"))) == 2
    plain, viewed = rows_of(tmp_path, "data"), rows_of(tmp_path, "data", view="other")
    assert plain.teacher_rule != viewed.teacher_rule
    own = find_scores("", str(tmp_path / "data"), view=viewed.teacher_rule.view)  # type: ignore[union-attr]
    config = StreamConfig(path=str(tmp_path / "data"), seq_length=64, stored_losses=own.path)
    with pytest.raises(ForeignLossesError, match=r"made through view .* seen as it was aligned"):
        AlignedRows(config)


def test_what_was_scored_stays_scored_when_the_dataset_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_viewed_world(tmp_path, "teacher")
    path = tmp_path / "data" / MANIFEST_FILE
    whole = decode_manifest(path.read_bytes())
    first = replace(whole, shards=whole.shards[:2], views=())
    path.write_bytes(encode_manifest(first))
    add_view(
        ViewRequest(str(tmp_path / "data"), "teacher", str(tmp_path / "tokenizer.json"), "other")
    )
    run_score(tmp_path, "--view", "other")
    before = sidecars(tmp_path)
    kept = tmp_path / "data" / kept_manifest_file(0)
    kept.parent.mkdir()
    kept.write_bytes(path.read_bytes())
    early = decode_manifest(path.read_bytes())
    path.write_bytes(encode_manifest(next_generation(early, shards=whole.shards)))
    assert validate_dataset(str(tmp_path / "data")).findings == ()
    add_view(
        ViewRequest(str(tmp_path / "data"), "teacher", str(tmp_path / "tokenizer.json"), "other")
    )
    capsys.readouterr()
    run_score(tmp_path, "--view", "other")
    assert "2 shards were taken over" in capsys.readouterr().out
    after = sidecars(tmp_path)
    assert {name for name in before if after[name] != before[name]} == {
        name for name in before if name.endswith(".json")
    }
    for generation in (0, 1):  # a run on the earlier one goes on with the new scores
        rows = rows_of(tmp_path, "data", view="other", generation=generation)
        assert np.isfinite(rows[0]["teacher_losses"].numpy()).any()
    assert validate_dataset(str(tmp_path / "data")).findings == ()
