"""Scoring a mixture: every dataset by the mixture's lengths, so that its rows take the losses."""

from pathlib import Path

import pytest
import torch

from beam_jobs.score.command import main
from pipeline.streaming import AlignedRows, StreamConfig
from schemas.errors import ForeignLossesError
from tests.support.datasets import build_dataset, make_texts
from tests.support.scored_data import (
    SEQ_LENGTH,
    online_losses,
    run_score,
    score_arguments,
    write_world,
)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A world with a second dataset, and a mixture of both."""
    write_world(tmp_path)
    build_dataset(tmp_path / "more", make_texts(12, seed=3))
    (tmp_path / "mixture.toml").write_text(
        '[datasets.data]\npath = "data"\n[datasets.more]\npath = "more"\nmax_epochs = 2\n'
        "[[stages]]\nweights = { data = 0.5, more = 0.5 }\n"
    )
    return tmp_path


def config(world: Path) -> StreamConfig:
    return StreamConfig(
        path=str(world / "mixture.toml"), seq_length=SEQ_LENGTH, stored_losses="teacher"
    )


def test_rows_of_a_scored_mixture_hold_the_teachers_losses(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = score_arguments(world)
    assert main([str(world / "mixture.toml"), *arguments[1:]]) == 0
    assert main([str(world / "mixture.toml"), *arguments[1:]]) == 0
    assert capsys.readouterr().out.count("is finished: the same teacher") == 2
    rows = AlignedRows(config(world))
    batch = rows.__getitems__(range(24))
    assert set(batch["source"].tolist()) == {0, 1}
    stored, online = batch["teacher_losses"], online_losses(world / "teacher", batch)
    has_loss = batch.teacher_has_loss
    assert int(has_loss.sum()) > 500
    torch.testing.assert_close(stored[has_loss], online[has_loss], rtol=2**-10, atol=1e-4)


def test_losses_of_two_conventions_are_refused(world: Path) -> None:
    run_score(world)
    elsewhere = world / "elsewhere"
    (elsewhere).mkdir()
    (world / "more").rename(elsewhere / "data")
    (world / "teacher").rename(elsewhere / "teacher")
    run_score(elsewhere, "--dtype", "bfloat16")
    (elsewhere / "data").rename(world / "more")
    with pytest.raises(ForeignLossesError, match=r'losses of "more" and of "data" are of two teac'):
        AlignedRows(config(world))
