"""What trackers get of a run, each offline and read by what is none of its own code."""

import json
import sqlite3
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.methods.method import Method
from pipeline.training.config import TrainConfig
from pipeline.training.loop import train
from tests.support.runs import read_log
from tests.support.scored_data import train_config

Losses = dict[int, float]


def train_in_two_parts(config: TrainConfig) -> Losses:
    """Train four steps with a stop after two; return the losses of log.jsonl."""
    train(replace(config, exit_after=2))
    train(config)
    losses = {record["step"]: record["loss"] for record in read_log(config.output)}
    assert list(losses) == [1, 2, 3, 4]
    return losses


@pytest.fixture
def config(world: Path, tmp_path: Path) -> TrainConfig:
    return train_config(world, tmp_path / "eight", method=Method("full"))


def test_wandb_gets_one_run_of_a_run_that_continues(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    losses = train_in_two_parts(replace(config, tracker="wandb"))
    wandb.teardown()  # ends its own process, which writes the files
    files = sorted(config.output.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [record for file in files for record in wandb_records(file)]
    found = {}
    for items in (record.history.item for record in records if record.HasField("history")):
        values = {item.nested_key[0]: json.loads(item.value_json) for item in items}
        found[values["_step"]] = values["loss"]
    assert found == pytest.approx(losses)
    runs = [record.run for record in records if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1
    assert {(run.project, run.display_name) for run in runs} == {("mine", "eight")}
    options = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert options["learning_rate"] == config.learning_rate
    assert options["method"]["name"] == "full"


def wandb_records(path: Path) -> list[Any]:
    """Return the records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, place, parts, records = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])  # after the checksum
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
        if kind in (1, 4):  # a whole record, or its last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_trackio_gets_one_run_of_a_run_that_continues(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the import
    pytest.importorskip("trackio")
    losses = train_in_two_parts(replace(config, tracker="trackio"))
    with sqlite3.connect(tmp_path / "trackio/vocag.db") as base:
        rows = base.execute("select run_id, run_name, step, metrics from metrics").fetchall()
        [(options,)] = base.execute("select config from configs").fetchall()
    assert {step: json.loads(values)["loss"] for *_, step, values in rows} == pytest.approx(losses)
    assert len(rows) == 4
    assert len({run_id for run_id, *_ in rows}) == 1
    assert {name for _, name, *_ in rows} == {"eight"}
    assert json.loads(options)["learning_rate"] == config.learning_rate


@pytest.mark.parametrize(
    ("tracker", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")],
)
def test_a_missing_package_is_named(
    config: TrainConfig, tracker: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    monkeypatch.delattr("torch.utils.tensorboard", raising=False)  # where an earlier test needed it
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    message = f"tracker={tracker} needs a package: pip install {tracker}"
    with pytest.raises(ValueError, match=message):
        train(replace(config, tracker=tracker))
    assert not (config.output / "checkpoint.pt").exists()


def test_what_keeps_a_tracker_from_starting_is_said(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("no API key configured\n…")

    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.start", start)
    with pytest.raises(
        ValueError, match=r"tracker=tensorboard doesn't start: no API key configured$"
    ):
        train(replace(config, tracker="tensorboard"))
