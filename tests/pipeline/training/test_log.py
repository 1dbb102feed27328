"""What a run says of its steps, and of the time that is left."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs vocag[torch]")

from pipeline.training.command import parse_config
from pipeline.training.log import RunLog


def times_left(output: Path, *more: str, step: int = 0, seconds: list[float]) -> list[str]:
    """Return what a start says after each of its steps, from `step` on."""
    given = ["--data", "d", "--student", "s", "--method", "full", "--output", str(output), *more]
    log = RunLog(parse_config([*given, "--num-steps", "6", "--warmup-steps", "0"]), step)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda line, **_: said.append(line))
        for number, taken in enumerate(seconds, step + 1):
            log.write(number, {"loss": 2.5, "seconds": taken})
    return [line.partition(": loss 2.5, seconds ")[2].partition(", ")[2] for line in said]


def test_the_time_left_is_the_remaining_steps_without_the_warm_up(tmp_path: Path) -> None:
    """A start's first two steps say nothing, and one slow step changes little."""
    seconds = [900.0, 500.0, 30.0, 31.0, 900.0, 30.0]
    assert times_left(tmp_path, seconds=seconds) == [
        *("", "", "about 1 min 30 s left", "about 1 min 1 s left", "about 31.0 s left"),
        "",
    ]
    assert times_left(tmp_path, step=3, seconds=[900.0, 500.0, 1.0]) == ["", "", ""]


def test_a_start_that_is_to_end_before_has_less_left(tmp_path: Path) -> None:
    told = times_left(tmp_path, "--exit-after", "4", seconds=[9.0, 9.0, 1.0, 1.0])
    assert told == ["", "", "about 1.0 s left", ""]
