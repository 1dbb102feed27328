"""A run's log.jsonl, run.toml, terminal and tracker."""

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.command_line.failures import first_line, naming
from pipeline.command_line.installed import installed_version
from pipeline.command_line.option_parsing import written_options
from pipeline.command_line.pasted import pasted
from pipeline.drawing.formatting import format_duration
from pipeline.training.config import OPTION_GROUPS, TrainConfig
from pipeline.training.disk import is_full, replacing

logger = logging.getLogger(__name__)

RUN_FILE = "run.toml"
LOG_FILE = "log.jsonl"
_RUN_FILE_HEAD = """\
# The options of a run of vocag {version}. To repeat it in another folder:
# vocag train --config {path} --output FOLDER
"""
WARM_STEPS = 2
"""First steps of a start, which take longer than the rest."""

_SHOWN = ("loss", "kept_fraction", "seconds")
_RECENT = 100


class RunLog:
    """A run's log; entries after its checkpoint are dropped."""

    def __init__(self, config: TrainConfig, step: int) -> None:
        """Open the log of a run at `step`."""
        config.output.mkdir(parents=True, exist_ok=True)
        write_run_file(config)
        self._tracker = _start_tracker(config, step) if config.tracker else None
        self._last_step, self._seconds = config.last_step, list[float]()
        self._path, self._unwritten = config.output / LOG_FILE, ""
        kept = [each for each in read_log(self._path) if each["step"] <= step]
        self.step: int = kept[-1]["step"] if kept else 0
        text = "".join(json.dumps(each) + "\n" for each in kept)
        if not self._path.exists() or self._path.read_text("utf-8") != text:
            _replace(self._path, text)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one step; non-finite values, such as a mean of nothing, become null.

        On a full disk it waits for the next.
        """
        record = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._unwritten += json.dumps({"step": step, **record}) + "\n"
        try:
            self._append()
        except OSError as error:
            if not is_full(error):
                raise
            logger.warning("step %d: %s can't be written, its disk is full", step, self._path)
        if self._tracker is not None:
            self._tracker.log(dict(values), step)
        shown = [name for name in values if name in _SHOWN or name.startswith("heldout")]
        parts = [f"{name} {values[name]:.4g}" for name in shown]
        if "seconds" in values:
            self._seconds.append(values["seconds"])
            parts += self._time_left(self._last_step - step)
        print(f"step {step}: {', '.join(parts)}", flush=True)

    def close(self) -> None:
        """Write what is unwritten, and end the tracker; OSError on a disk that is still full."""
        if self._tracker is not None:
            self._tracker.finish()
        self._append()

    def _append(self) -> None:
        """Add all unwritten lines, or none."""
        num_bytes = self._path.stat().st_size
        try:
            with naming(str(self._path)), self._path.open("a", encoding="utf-8") as file:
                file.write(self._unwritten)
            self._unwritten = ""
        except OSError:
            os.truncate(self._path, num_bytes)
            raise

    def _time_left(self, num_steps: int) -> list[str]:
        recent = self._seconds[max(WARM_STEPS, len(self._seconds) - _RECENT) :]
        if not recent or not num_steps:
            return []
        return [f"about {format_duration(num_steps * median(recent))} left"]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the steps of a run's log, without a last line that is cut; ValueError if altered."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    steps: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            steps.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number}, can't be read ({error}): it was altered; delete that "
                    "line, or move the file away"
                ) from error
    return steps


def write_run_file(config: TrainConfig) -> None:
    """Write a run's options as OUTPUT/run.toml, for `vocag train --config`."""
    path = config.output / RUN_FILE
    head = _RUN_FILE_HEAD.format(version=installed_version(), path=pasted(str(path)))
    # These end one start of the run; they don't describe it.
    options = written_options(config, groups=OPTION_GROUPS, without=("exit_after", "dry_run"))
    _replace(path, head + options)


def _replace(path: Path, text: str) -> None:
    """Write a file whole, so that a full disk leaves what it held; DiskFullError."""
    with replacing(path, len(text.encode())) as whole:
        whole.write_text(text, "utf-8")


def _start_tracker(config: TrainConfig, step: int) -> Any:
    """A resumed run stays one run in the tracker."""
    from accelerate import PartialState, tracking

    PartialState()  # it finds the existing process group, and trackers ask for it
    name, output = str(config.tracker), str(config.output)
    values = json.loads(json.dumps(asdict(config), default=str))
    run = {"name": config.output.resolve().name, "config": values}
    earlier = sorted(config.output.glob("wandb/*run-*-*"))
    run_id = earlier[-1].name.rpartition("-")[2] if step and earlier else None
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": "", "logging_dir": output, "purge_step": step + 1},
        "trackio": {"run_name": "vocag", "resume": "allow" if step else "never", **run},
        # wandb finds the project itself, from WANDB_PROJECT or its settings.
        "wandb": {"run_name": None, "dir": output, "id": run_id, "resume": "allow", **run},
    }
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**options[name])
    try:
        tracker.start()
    except ModuleNotFoundError as error:
        raise ValueError(f"tracker={name} needs a package: pip install {name}") from error
    except Exception as error:  # of each tracker's own types, such as wandb's for a missing key
        raise ValueError(f"tracker={name} doesn't start: {first_line(error)}") from error
    return tracker
