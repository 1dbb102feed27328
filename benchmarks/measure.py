"""Timing for benchmarks: contenders take turns in the same rounds, ratios are of the same round."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Contender = Callable[[], Callable[[], object]]

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Times:
    """Seconds of each contender in each round, wall clock and CPU of the process."""

    wall: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]

    def seconds(self, name: str) -> float:
        """Return a contender's median wall time."""
        return statistics.median(self.wall[name])

    def cpu_seconds(self, name: str) -> float:
        """Return a contender's median CPU time."""
        return statistics.median(self.cpu[name])

    def ratio(self, name: str, other: str) -> float:
        """Return the median over rounds of one contender's wall time by another's."""
        return _median_ratio(self.wall[name], self.wall[other])

    def cpu_ratio(self, name: str, other: str) -> float:
        """Return the same of CPU time, which background threads can't hide from."""
        return _median_ratio(self.cpu[name], self.cpu[other])

    def show(self, name: str) -> str:
        """Return median, least and most seconds."""
        wall = self.wall[name]
        return f"{self.seconds(name):.2f} s ({min(wall):.2f} to {max(wall):.2f})"


@dataclass
class Report:
    """What was measured against which target, printed as it comes."""

    missed: list[str] = field(default_factory=list)

    def say(self, what: str, value: str) -> None:
        """Print a measurement that has no target."""
        print(f"  {what:<44} {value}", flush=True)

    def check(self, what: str, value: float, *, least: float | None = None,
              most: float | None = None, unit: str = "x") -> None:  # fmt: skip
        """Print a measurement, its target and whether it holds."""
        holds = (least is None or value >= least) and (most is None or value <= most)
        target = f"at least {least:g}" if least is not None else f"at most {most:g}"
        verdict = "holds" if holds else "MISSED"
        self.say(what, f"{value:.2f} {unit}, target {target}: {verdict}")
        if not holds:
            self.missed.append(what)


def measure(contenders: Mapping[str, Contender], rounds: int) -> Times:
    """Run the contenders in turn, `rounds` times.

    Args:
        contenders: each prepares itself, outside the clock, and returns what is timed. A fast
            encoder remembers the words that it has seen, so a text must meet a new tokenizer each
            round: real corpora are read once.
        rounds: how often.

    Example:
        >>> measure({"ours": prepare_ours, "rival": prepare_rival}, 5).ratio("ours", "rival")
    """
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, prepare in contenders.items():
            run = prepare()
            started, started_cpu = time.perf_counter(), _cpu_seconds()
            run()
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(_cpu_seconds() - started_cpu)
    return Times(wall, cpu)


def run_process(arguments: Sequence[str | Path]) -> str:
    """Run a Python process to its end and return what it printed; a failure ends the benchmark."""
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def peak_memory(arguments: Sequence[str | Path], log: Path) -> tuple[float, float]:
    """Run a Python process; return its peak memory in bytes: all of it, and its own.

    Pages of mapped files are counted in the first figure only; the system takes them back whenever
    it needs them.
    """
    command = [sys.executable, *map(str, arguments)]
    own = 0
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            own = max(own, _own_bytes(process.pid))
            time.sleep(_POLL_SECONDS)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()}")
    return usage.ru_maxrss * 1024, own


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # ended since it was last looked at
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))
