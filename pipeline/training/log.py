"""What a run writes down: log.jsonl, the terminal and, if wanted, TensorBoard."""

import json
import math
from collections.abc import Mapping
from typing import Any

from pipeline.training.config import TrainConfig

_SHOWN = ("loss", "kept_fraction", "seconds")


class RunLog:
    """The log of a run; what a checkpoint does not know is dropped."""

    def __init__(self, config: TrainConfig, step: int) -> None:
        """Open the log of a run that is at `step`.

        Raises:
            ValueError: a package that is wanted and missing.
        """
        self._board = _open_board(config, step) if config.tensorboard else None
        self._path = config.output / "log.jsonl"
        config.output.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text("utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self._path.write_text("".join(line + "\n" for line in kept), "utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one step; what isn't finite, as where nothing was averaged, is written as null."""
        record = {k: v if math.isfinite(v) else None for k, v in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        shown = [name for name in values if name in _SHOWN or name.startswith("heldout")]
        parts = [f"{name} {values[name]:.4g}" for name in shown]
        print(f"step {step}: {', '.join(parts)}", flush=True)


def _open_board(config: TrainConfig, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ValueError("--tensorboard needs a package: pip install tensorboard") from error
    return SummaryWriter(str(config.output), purge_step=step + 1)
