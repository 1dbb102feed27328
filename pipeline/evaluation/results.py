"""A student's results, with 95 % confidence intervals, in files."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from scipy.special import stdtrit

RESULTS_FILE = "results.json"
_Z = 1.959964  # of the normal distribution: 95 %, for shares


@dataclass(frozen=True)
class Value:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """One measure on one set: shares (0 to 1) or bits per byte, by name.

    `limit` 0 means the whole set, `answer_tokens` 0 no generation. `data` is from `describe_data`,
    `settings` are how the student ran.
    """

    num_items: int
    values: Mapping[str, Value] = field(default_factory=dict)
    limit: int = 0
    num_left_out: int = 0
    answer_tokens: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass
class Results:
    """One student's results, by set and measure."""

    student: str
    source: str
    sha256: str
    measurements: dict[str, dict[str, Measurement]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replace the folder's results atomically."""
        replace_file(folder / RESULTS_FILE, json.dumps(asdict(self), indent=1) + "\n")

    def all(self) -> Iterator[tuple[str, str, Measurement]]:
        """Yield set, measure and measurement."""
        for name, measures in self.measurements.items():
            for measure, made in measures.items():
                yield name, measure, made

    def find(self, name: str, measure: str, metric: str) -> Value | None:
        """Return a value; None if it wasn't measured."""
        made = self.measurements.get(name, {}).get(measure)
        return made.values.get(metric) if made else None


def student_folders(output: Path) -> list[Path]:
    """Return the folders of students with results."""
    return sorted(path.parent for path in output.glob(f"*/{RESULTS_FILE}"))


def read_samples(folder: Path, name: str, measure: str) -> list[dict[str, Any]]:
    """Return a student's samples of a set, if measured; ValueError for a damaged file."""
    path = folder / "samples" / f"{name}.{measure}.jsonl"
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): evaluate that student again") from error


def read_results(folder: Path) -> Results:
    """Return a folder's results; ValueError for a malformed file."""
    path = folder / RESULTS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} isn't a result of vocag evaluate ({error}): remove it") from error


def share(values: Sequence[float]) -> Value:
    """Return the share of ones, with Wilson's interval."""
    num, mean = len(values), math.fsum(values) / len(values)
    centre = (mean + _Z**2 / (2 * num)) / (1 + _Z**2 / num)
    half = _Z / (1 + _Z**2 / num) * math.sqrt(mean * (1 - mean) / num + _Z**2 / (4 * num**2))
    # At both ends the interval touches the value itself, but for rounding.
    return Value(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def share_difference(pairs: Sequence[tuple[float, float]]) -> Value:
    """Return the difference of two shares of the same items, each 1 or 0.

    The interval is Agresti and Min's, meaningful even if the two never differ.
    """
    num = len(pairs)
    gained = sum(one > other for one, other in pairs)
    lost = sum(one < other for one, other in pairs)
    centre = (gained - lost) / (num + 2)
    half = _Z / (num + 2) * math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / (num + 2))
    value = (gained - lost) / num
    return Value(value, min(value, max(-1.0, centre - half)), max(value, min(1.0, centre + half)))


def bits_per_byte(pairs: Sequence[tuple[float, int]]) -> Value:
    """Return all texts' bits per byte, from (log-likelihood in nats, length in bytes).

    The interval is a linearised ratio's, by Student's t. That of one item is unbounded; it is left
    at the value, and tables show "–".
    """
    return _around(*_ratio(pairs))


def bits_difference(
    pairs: Sequence[tuple[tuple[float, int], tuple[float, int]]],
) -> Value:
    """Return one student's bits per byte less another's, of the same items.

    Of conversations the two may count different bytes: each student has its own template.
    """
    ones, others = (_ratio(side) for side in zip(*pairs, strict=True))
    moves = [one - other for one, other in zip(ones[1], others[1], strict=True)]
    return _around(ones[0] - others[0], moves)


def _ratio(pairs: Sequence[tuple[float, int]]) -> tuple[float, list[float]]:
    """Return bits per byte, and how far each item moves them."""
    total = sum(length for _, length in pairs)
    bits = [-nats / math.log(2) for nats, _ in pairs]
    ratio = math.fsum(bits) / total
    return ratio, [(b - ratio * n) / total for b, (_, n) in zip(bits, pairs, strict=True)]


def _around(value: float, moves: Sequence[float]) -> Value:
    num, half = len(moves), 0.0
    if num > 1:
        spread = math.fsum(move**2 for move in moves)
        half = float(stdtrit(num - 1, 0.975)) * math.sqrt(num / (num - 1) * spread)
    return Value(value, value - half, value + half)


def summarise(samples: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """Return the values of lm-eval's samples, by metric."""
    makers: dict[str, Callable[[Sequence[Any]], Value]] = {
        "bits_per_byte": bits_per_byte,
        "chance": _known_mean,
    }
    return {
        metric: makers.get(metric, share)([sample[metric] for sample in samples])
        for metric in samples[0]["metrics"]
    }


def _known_mean(values: Sequence[float]) -> Value:
    mean = math.fsum(values) / len(values)
    return Value(mean, mean, mean)


def replace_file(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
