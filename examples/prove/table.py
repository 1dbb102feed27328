"""The runs compared: means over seeds, differences paired by seed, and what they say.

    python examples/prove/table.py prove

Writes table.json, table.md and a plot for each held-out set; docs/evidence.md has the rules.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pipeline.drawing.charts import write_figure
from pipeline.drawing.differences import difference_chart

MATHEMATICS = ("gsm8k", "math")
STAGES = ("main", "last")
_NAMES = {"main": "before the last stage", "last": "after it"}

Values = dict[int, float]
"""One value per seed."""


@dataclass(frozen=True)
class Runs:
    """Every measure of every run.

    Attributes:
        measures: by data, arm, seed, stage and held-out set.
        seconds: by data, arm and seed, of the steps of the arm's own training.
    """

    measures: dict[str, dict[str, dict[int, Any]]]
    seconds: dict[str, dict[str, Values]]

    def values(self, data: str, arm: str, measure: str, *, stage: str, held_out: str) -> Values:
        """Return a measure by seed; empty where an arm or a set has none."""
        own = self.measures.get(data, {}).get(arm, {})
        found = {seed: stages[stage][held_out].get(measure) for seed, stages in own.items()}
        return {seed: value for seed, value in found.items() if value is not None}


def read_runs(folder: Path) -> Runs:
    """Read what `measure.py` and `vocag train` have written."""
    measures: dict[str, dict[str, dict[int, Any]]] = {}
    seconds: dict[str, dict[str, Values]] = {}
    for run in sorted((folder / "runs").glob("*/*/seed-*")):
        data, arm, seed = run.parts[-3], run.parts[-2], int(run.name.removeprefix("seed-"))
        measures.setdefault(data, {}).setdefault(arm, {})[seed] = {
            stage: json.loads((run / stage / "model" / "measures.json").read_text("utf-8"))
            for stage in STAGES
        }
        log = (run / "main" / "log.jsonl").read_text("utf-8").splitlines()
        spent = sum(json.loads(line)["seconds"] for line in log)
        seconds.setdefault(data, {}).setdefault(arm, {})[seed] = spent
    return Runs(measures, seconds)


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    """Return the mean difference over common seeds and its standard error; NaN from one seed.

    Example:
        >>> paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.0})
        (0.75, 0.25)
    """
    differences = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
    if not differences:
        return math.nan, math.nan
    several = len(differences) > 1
    error = stdev(differences) / math.sqrt(len(differences)) if several else math.nan
    return fmean(differences), error


def better(own: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Say whether bits are fewer in every seed, by more than two paired standard errors.

    Example:
        >>> better({0: 1.0, 1: 1.1}, {0: 1.2, 1: 1.3})
        True
    """
    difference, error = paired(own, other)
    each = all(own[seed] < other[seed] for seed in own.keys() & other.keys())
    return each and difference < -2 * error


def verdicts(runs: Runs) -> dict[str, bool]:
    """Return which of the rules that were written down hold."""

    def bits(data: str, arm: str, held_out: str) -> Values:
        return runs.values(data, arm, "bits_per_byte", stage="last", held_out=held_out)

    def gain(data: str, held_out: str) -> float:
        return -paired(bits(data, "teacher-0.4", held_out), bits(data, "full", held_out))[0]

    def no_worse(arm: str, other: str, held_out: str) -> bool:
        return paired(bits("noisy", arm, held_out), bits("noisy", other, held_out))[0] <= 0

    wins = all(
        better(bits("noisy", "teacher-0.4", name), bits("noisy", other, name))
        for other in ("random-0.4", "full")
        for name in MATHEMATICS
    )
    shrinks = all(gain("clean", name) < gain("noisy", name) for name in MATHEMATICS)
    clean_sets = (*MATHEMATICS, "docstrings")
    plain = all(no_worse("full", f"teacher-{k}", n) for k in (0.4, 0.6) for n in clean_sets)
    chance = any(no_worse("random-0.4", "teacher-0.4", name) for name in MATHEMATICS)
    taste = all(no_worse("teacher_loss-0.4", "teacher-0.4", name) for name in MATHEMATICS)
    return {"for": wins and shrinks, "against": plain or chance, "against the difference": taste}


def summarise(runs: Runs) -> dict[str, Any]:
    """Return means, and differences to `full` with their errors, by data, arm, stage and set."""
    found: dict[str, Any] = {}
    for data, arms in runs.measures.items():
        for arm, seeds in arms.items():
            of_arm = found.setdefault(data, {}).setdefault(arm, {"seeds": sorted(seeds)})
            of_arm["seconds"] = fmean(runs.seconds[data][arm].values())
            for stage in STAGES:
                of_arm[stage] = {
                    held_out: _compare(runs, data, arm, stage, held_out)
                    for held_out in next(iter(seeds.values()))[stage]
                }
    return found


def _compare(runs: Runs, data: str, arm: str, stage: str, held_out: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for measure in ("bits_per_byte", "end_bits", "top_1", "results"):
        own = runs.values(data, arm, measure, stage=stage, held_out=held_out)
        if own:
            full = runs.values(data, "full", measure, stage=stage, held_out=held_out)
            difference, error = paired(own, full)
            found[measure] = {
                "mean": fmean(own.values()),
                "to_full": None if math.isnan(difference) else difference,
                "error": None if math.isnan(error) else error,
            }
    return found


def render(summary: dict[str, Any], found: dict[str, bool], extra: dict[str, Any]) -> str:
    """Return the whole as Markdown."""
    lines = [f"**{rule}**: {'yes' if holds else 'no'}" for rule, holds in found.items()]
    parts = ["# Table", "", "Rules of docs/evidence.md that hold: " + "; ".join(lines) + ".", ""]
    for data, arms in summary.items():
        sets = list(next(iter(arms.values()))["last"])
        for stage in reversed(STAGES):
            parts += [f"## {data}, {_NAMES[stage]}: bits per byte, and difference to `full`", ""]
            parts += [_row(["arm", "seeds", "s", *sets]), _row(["---"] * (3 + len(sets)))]
            for arm, own in arms.items():
                cells = [_cell(own[stage][name]["bits_per_byte"], 4) for name in sets]
                parts.append(_row([arm, len(own["seeds"]), f"{own['seconds']:.0f}", *cells]))
            parts.append("")
        parts += [f"## {data}, after the last stage: accuracy, %", ""]
        heads = [f"{name}, top-1" for name in sets] + ["results of calculations"]
        parts += [_row(["arm", *heads]), _row(["---"] * (1 + len(heads)))]
        for arm, own in arms.items():
            cells = [_cell(own["last"][name]["top_1"], 2, 100) for name in sets]
            results = own["last"]["gsm8k"].get("results")
            parts.append(_row([arm, *cells, _cell(results, 2, 100) if results else "–"]))
        parts.append("")
    parts += ["## Beside it", "", "```json", json.dumps(extra, indent=1), "```", ""]
    return "\n".join(parts)


def _cell(value: dict[str, Any], digits: int, scale: float = 1.0) -> str:
    text = f"{scale * value['mean']:.{digits}f}"
    if value["to_full"] is None:
        return text
    error = "" if value["error"] is None else f" ± {scale * value['error']:.{digits}f}"
    return f"{text} ({scale * value['to_full']:+.{digits}f}{error})"


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(summary: dict[str, Any], data: str, folder: Path) -> None:
    """Write a plot of differences to `full` for each held-out set."""
    arms = {arm: own for arm, own in summary[data].items() if arm != "full"}
    for held_out in next(iter(arms.values()))["last"]:
        series = {
            _NAMES[stage]: [
                (bits["to_full"], bits["error"] or 0.0) if bits["to_full"] is not None else None
                for own in arms.values()
                for bits in [own[stage][held_out]["bits_per_byte"]]
            ]
            for stage in STAGES
        }
        chart = difference_chart(
            f"{held_out}, trained on {data} text: bits per byte, difference to full",
            list(arms),
            series,
            x_label="bits per byte more than full (less is better), ± standard error over seeds",
        )
        write_figure(chart, folder / f"{data}-{held_out}.svg")


def beside(folder: Path) -> dict[str, Any]:
    """Return what else a reader needs: rates, the gate, kept shares after training, the teacher."""
    lines = (folder / "seconds.jsonl").read_text("utf-8").splitlines()
    spent = {entry["result"]: entry["seconds"] for entry in map(json.loads, lines)}
    kept = {
        str(path.relative_to(folder / "runs").parent): json.loads(path.read_text("utf-8"))["kept"]
        for path in sorted((folder / "runs").glob("noisy/*/seed-*/kept.json"))
    }
    return {
        "learning_rates": json.loads((folder / "rates.json").read_text("utf-8")),
        "gate": json.loads((folder / "gate.json").read_text("utf-8")),
        "seconds_of_scoring": {name: spent.get(f"scored-{name}") for name in ("noisy", "clean")},
        "kept_by_teacher_after_training": {run: own["teacher"] for run, own in kept.items()},
    }


def main() -> None:
    """Write the table and the plots."""
    parser = argparse.ArgumentParser(description="Compare the experiment's runs.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs = read_runs(folder)
    summary, found, extra = summarise(runs), verdicts(runs), beside(folder)
    everything = {"verdicts": found, "arms": summary, **extra}
    (folder / "table.json").write_text(json.dumps(everything, indent=1) + "\n", "utf-8")
    for data in summary:
        draw(summary, data, folder)
    (folder / "table.md").write_text(render(summary, found, extra), "utf-8")


if __name__ == "__main__":
    main()
