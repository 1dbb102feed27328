"""What runs leave: records and rates in an experiment's folder, and where they are published.

A machine may be lost between two sessions; what is published needn't be made again.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kept:
    """The records and rates of an experiment.

    Attributes:
        own: folder of the experiment.
        published: folder where its records are published, in the repository; None: nowhere.
    """

    own: Path
    published: Path | None = None

    def record(self, arm: str, seed: int) -> Path:
        """Return the place of a run's record."""
        return self.own / "records" / f"{arm}-{seed}.json"

    def rate(self, arm: str) -> Path:
        """Return the place of what a search of rates found."""
        return self.own / "rates" / f"{arm}.json"

    def take(self, path: Path) -> dict[str, Any] | None:
        """Return what is published of a record or a rate, and put it in its place."""
        source = self._published(path)
        if source is None or not source.exists():
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found

    def write(self, path: Path, found: Mapping[str, Any]) -> None:
        """Write a record or a rate, here and where it is published."""
        for place in filter(None, (path, self._published(path))):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(found) + "\n", "utf-8")

    def add_cost(self, command: str, cpu_seconds: float) -> None:
        """Write down what a command took, in `costs.jsonl`."""
        line = json.dumps({"command": command, "cpu_seconds": round(cpu_seconds, 1)})
        for folder in filter(None, (self.own, self.published)):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "costs.jsonl").open("a", encoding="utf-8") as file:
                print(line, file=file)

    def _published(self, path: Path) -> Path | None:
        name = path.name if path.parent.name == "records" else f"rate-{path.name}"
        return None if self.published is None else self.published / name


def search_rate(tried: Callable[[float], float], first: float) -> dict[float, float]:
    """Return bits per byte by rate: a rate doubled and halved until both neighbours are worse.

    Args:
        tried: returns the bits per byte that a rate leads to.
        first: rate to begin with.

    Example:
        >>> search_rate(lambda rate: abs(rate - 4), 1.0)
        {1.0: 3.0, 2.0: 2.0, 0.5: 3.5, 4.0: 0.0, 8.0: 4.0}
    """
    found = {first: tried(first)}
    while True:
        best = min(found, key=found.__getitem__)
        missing = [rate for rate in (2 * best, best / 2) if rate not in found]
        if not missing:
            return found
        for rate in missing:
            found[rate] = tried(rate)


def drop_weights(folder: Path) -> None:
    """Remove a run's models and checkpoints; its log and measures stay."""
    for path in (*folder.glob("step-*"), *folder.glob("*/model"), folder / "model"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.rglob("checkpoint.pt"):
        path.unlink()
