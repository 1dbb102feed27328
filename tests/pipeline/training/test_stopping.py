"""What ends a run, or would: signals, another run in its folder, a disk that is full."""

import errno
import os
import shutil
import signal
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.command_line import commands
from pipeline.command_line.folder_lock import hold_folder
from pipeline.methods.method import Method
from pipeline.training import disk, loop
from pipeline.training.checkpoint import CHECKPOINT
from pipeline.training.command import main
from pipeline.training.config import TrainConfig
from pipeline.training.log import RUN_FILE, RunLog, write_run_file
from pipeline.training.loop import OUTPUT_LOCK, train
from pipeline.training.stopping import RunStoppedError
from schemas.errors import DatasetError
from tests.support.killing import run_ranks
from tests.support.runs import read_log, require_equal_weights
from tests.support.scored_data import train_config

STOPS_AFTER = 2
KEPT = ["checkpoint.pt", "log.jsonl", "model", "run.toml"]


class Usage(NamedTuple):
    """Of a disk."""

    free: int


SIZES: dict[str, Any] = {
    "global_batch_size": 4,
    "warmup_steps": 1,
    "device": "cpu",
    "method": Method("full"),
}


@pytest.fixture
def config(world: Path, tmp_path: Path) -> TrainConfig:
    return train_config(world, tmp_path / "run", **SIZES)


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has stopped."""
    output = tmp_path_factory.mktemp("whole")
    train(train_config(world, output, **SIZES))
    return output


def without_seconds(output: Path) -> list[dict[str, Any]]:
    return [each | {"seconds": None} for each in read_log(output)]


def arguments(config: TrainConfig) -> list[str]:
    return [
        *("--data", config.data.path, "--student", config.student, "--method", "full"),
        *("--output", str(config.output), "--device", "cpu", "--seq-length", "64"),
        *("--global-batch-size", "4", "--micro-batch-size", "2", "--num-steps", "4"),
        *("--warmup-steps", "1", "--learning-rate", "1e-3"),
        *("--schedule", "constant", "--weight-decay", "0"),
    ]


def send_in_step(patch: pytest.MonkeyPatch, number: int, times: int = 1) -> None:
    """Let this process get a signal in the middle of a step."""
    original = loop.train_step

    def step(run: loop.Run, loader: object, step: int) -> dict[str, float]:
        if step == STOPS_AFTER - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return original(run, loader, step)  # type: ignore[arg-type]

    patch.setattr(loop, "train_step", step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_step_end_and_a_checkpoint_be_written(
    config: TrainConfig, whole: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        send_in_step(patch, number)
        assert main(arguments(config)) == 128 + number
    told = capsys.readouterr().err
    assert "stopping after this step, with a checkpoint" in told
    assert f"stopped after step {STOPS_AFTER}, with a checkpoint; run the same command" in told
    assert signal.getsignal(number) == handler
    assert sorted(path.name for path in config.output.iterdir()) == [
        name for name in KEPT if name != "model"
    ]
    train(config)
    require_equal_weights(config.output, whole)


def test_a_second_ctrl_c_ends_at_once(config: TrainConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        send_in_step(patch, signal.SIGINT, times=2)
        with pytest.raises(KeyboardInterrupt) as raised:
            train(config)
    assert not isinstance(raised.value, RunStoppedError)
    assert not (config.output / "checkpoint.pt").exists()


def test_nohup_keeps_a_run_from_a_terminal_that_goes(config: TrainConfig) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.MonkeyPatch.context() as patch:
            send_in_step(patch, signal.SIGHUP)
            train(config)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (config.output / "model").exists()


def test_a_run_in_a_thread_leaves_signals_alone(config: TrainConfig) -> None:
    run = replace(config, exit_after=1)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            train(run)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    assert (run.output / "checkpoint.pt").exists()


def stop_second_rank(argv: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            send_in_step(patch, signal.SIGTERM)
        assert main(argv) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_all_processes_stop_after_the_same_step(config: TrainConfig) -> None:
    """Though only one of them got the signal."""
    run_ranks(stop_second_rank, arguments(config))
    assert [step["step"] for step in read_log(config.output)] == [1, STOPS_AFTER]
    assert torch.load(config.output / "checkpoint.pt")["step"] == STOPS_AFTER


@pytest.mark.parametrize(
    ("number", "how"), [(15, "terminated"), (1, "the terminal is gone"), (2, "interrupted")]
)
def test_before_the_first_step_a_signal_ends_the_command(
    config: TrainConfig,
    number: int,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is nothing to keep, and nothing is left."""
    monkeypatch.setattr(loop, "open_training", lambda *_, **__: signal.raise_signal(number))
    # A shell's background process inherits a Ctrl-C that is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as ended:
        commands.main(["train", *arguments(config)])
    signal.signal(signal.SIGINT, before)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == f"vocag train: {how}"
    assert not config.output.exists()


def test_a_folder_that_another_run_writes_to_is_refused(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(config, exit_after=1)
    with hold_folder(str(run.output / OUTPUT_LOCK), str(run.output)):
        assert main(arguments(run)) == 2
        told = capsys.readouterr().err
        assert f"process {os.getpid()} on" in told
        assert f"writes to {run.output}; wait until it has ended" in told
        assert [path.name for path in run.output.iterdir()] == [OUTPUT_LOCK]
    train(run)
    assert not (run.output / OUTPUT_LOCK).exists()


def test_a_model_that_no_run_has_made_is_not_replaced(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --output . it may be anything; or a run's whose checkpoint was too large to keep."""
    (config.output / "model").mkdir(parents=True)
    (config.output / "model" / "code.py").write_text("mine")
    assert main(arguments(config)) == 2
    told = capsys.readouterr().err
    assert f"{config.output}/model is there without the checkpoint of its run, and a new" in told
    assert told.endswith(f"hint: --output {config.output}-2\n")
    assert (config.output / "model" / "code.py").read_text() == "mine"
    assert [path.name for path in config.output.iterdir()] == ["model"]


def test_a_checkpoint_without_room_is_named_and_the_run_goes_on(
    config: TrainConfig,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, number = replace(config, checkpoint_every=1), iter(range(99))
    remove = disk._remove

    def remove_and_fill(path: Path) -> None:
        remove(path)
        # Of the second checkpoint, before it is written; each is removed before and after.
        if path.name == f".{CHECKPOINT}.tmp" and next(number) == 2:
            path.symlink_to("/dev/full")

    monkeypatch.setattr(disk, "_remove", remove_and_fill)
    train(run)
    (said,) = [text for text in caplog.messages if "disk is full" in text]
    assert said.startswith(f"step 2: {run.output / 'checkpoint.pt'} needs ")
    assert "make room; the run goes on, and what it kept before stays" in said
    assert sorted(path.name for path in run.output.iterdir()) == KEPT
    require_equal_weights(run.output, whole)


def test_a_full_disk_leaves_the_options_of_a_run(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_file(config)
    kept = (config.output / RUN_FILE).read_text()

    def fill(path: Path) -> None:
        if not path.is_symlink():
            path.symlink_to("/dev/full")

    monkeypatch.setattr(disk, "_remove", fill)
    with pytest.raises(disk.DiskFullError, match=r"run\.toml needs .* and the disk is full"):
        write_run_file(config)
    assert (config.output / RUN_FILE).read_text() == kept


def test_a_folder_s_line_end_is_none_in_the_options_of_a_run(config: TrainConfig) -> None:
    """It cut the comment that names the file, so that `--config` refused it."""
    odd = replace(config, output=config.output / "one\nit's another")
    write_run_file(odd)
    written = (odd.output / RUN_FILE).read_text()
    assert tomllib.loads(written)["output"] == str(odd.output)
    assert "/one\\U0000000ait\\'s another/run.toml' --output FOLDER\n" in written


def test_a_run_may_write_to_the_folder_it_is_started_in(
    config: TrainConfig, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.output.mkdir()
    monkeypatch.chdir(config.output)
    train(replace(config, output=Path()))
    require_equal_weights(config.output, whole)


def test_what_goes_wrong_while_measuring_costs_no_step(
    config: TrainConfig, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start makes up for the measurements, and ends with the same model."""

    def fail(*_: object) -> dict[str, float]:
        raise DatasetError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.loop.evaluate", fail)
        with pytest.raises(DatasetError, match="damaged"):
            train(config)
    assert torch.load(config.output / "checkpoint.pt")["step"] == config.num_steps
    monkeypatch.setattr("pipeline.training.loop.evaluate", lambda *_: {"heldout": 1.0})
    assert train(config)["heldout"] == 1.0
    *steps, last = without_seconds(config.output)
    assert last == {**without_seconds(whole)[-1], "heldout": 1.0}
    assert len(steps) == config.num_steps - 1
    require_equal_weights(config.output, whole)


def test_a_kill_between_a_checkpoint_and_its_line_in_the_log_costs_no_line(
    config: TrainConfig, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original = replace(config, checkpoint_every=1), RunLog.write
    for killed in range(1, run.num_steps + 1):

        def write(log: RunLog, step: int, values: Mapping[str, float], at: int = killed) -> None:
            if step == at:
                raise KeyboardInterrupt
            original(log, step, values)

        monkeypatch.setattr(RunLog, "write", write)
        with pytest.raises(KeyboardInterrupt):
            train(run)
    monkeypatch.setattr(RunLog, "write", original)
    train(run)
    assert without_seconds(run.output) == without_seconds(whole)


def test_an_export_that_a_kill_prevented_is_made_up_for(config: TrainConfig) -> None:
    exporting = replace(config, export_every=1)
    train(replace(exporting, exit_after=1))
    shutil.rmtree(config.output / "step-000001")
    train(replace(exporting, exit_after=2))
    assert {"step-000001", "step-000002"} <= {path.name for path in config.output.iterdir()}


def test_a_log_on_a_full_disk_is_written_later(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened, refusals = Path.open, iter([True])

    def refuse_once(path: Path, mode: str = "r", **more: Any) -> Any:
        if path.name == "log.jsonl" and mode == "a" and next(refusals, False):
            raise OSError(errno.ENOSPC, "no room")
        return opened(path, mode, **more)

    monkeypatch.setattr(Path, "open", refuse_once)
    train(config)
    assert [each["step"] for each in read_log(config.output)] == [*range(1, config.num_steps + 1)]
    assert "step 1: " in caplog.text
    assert "its disk is full" in caplog.text


def test_a_log_that_a_full_disk_holds_back_to_the_end_is_an_error(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had fewer lines, without a word but a warning's."""
    opened = Path.open

    def refuse(path: Path, mode: str = "r", **more: Any) -> Any:
        if path.name == "log.jsonl" and mode == "a":
            raise OSError(errno.ENOSPC, "no room")
        return opened(path, mode, **more)

    monkeypatch.setattr(Path, "open", refuse)
    assert main(arguments(config)) == 2
    assert "log.jsonl can't be written, for its disk is full" in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end_is_an_error(
    config: TrainConfig, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if it was the model, after the last checkpoint, that had no room."""
    for refused, num_before in {"checkpoint.pt": 2, "model": 3}.items():  # run.toml and the log
        with pytest.MonkeyPatch.context() as patch:
            free = iter([1 << 60] * num_before + [1])
            place = "pipeline.training.disk.shutil.disk_usage"
            patch.setattr(place, lambda _, free=free: Usage(next(free)))
            assert main(arguments(config)) == 2
        told = capsys.readouterr().err
        assert f"{config.output / refused} needs" in told
        assert "of disk, 1 B are free: make room" in told
    assert torch.load(config.output / "checkpoint.pt")["step"] == 4
    train(config)
    require_equal_weights(config.output, whole)
