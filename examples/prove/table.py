"""The runs compared: means over seeds, differences paired by seed, and what they say.

    python examples/prove/table.py prove

Writes table.json, table.md, a plot for each mixture and stage, and timing.json beside them: seconds
differ from run to run, the others don't. Works on the runs that are done, too. The rules are those
of docs/evidence.md.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from prove.commands import DONE
from prove.drawing import CLEAN_SETS, STAGES, draw, render

MATHEMATICS = ("gsm8k", "math")
MEASURES = ("bits_per_byte", "end_bits", "top_1", "results", "solution")
TEACHER = "teacher-0.4"

Values = dict[int, float]
"""One value per seed."""


@dataclass(frozen=True)
class Runs:
    """Every measure of every run.

    Attributes:
        measures: by data, arm, seed, stage and held-out set.
    """

    measures: dict[str, dict[str, dict[int, Any]]]

    def values(
        self, data: str, arm: str, measure: str, *, stage: str = "last", held_out: str
    ) -> Values:
        """Return a measure by seed; empty where an arm or a set has none."""
        own = self.measures.get(data, {}).get(arm, {})
        found = {seed: stages[stage][held_out].get(measure) for seed, stages in own.items()}
        return {seed: value for seed, value in found.items() if value is not None}


def read_runs(folder: Path) -> Runs:
    """Read what `measure.py` says of the runs, and `vocag evaluate` of those that it has asked."""
    measures: dict[str, dict[str, dict[int, Any]]] = {}
    for run in sorted((folder / "runs").glob("*/*/seed-*")):
        record = folder / DONE / run.relative_to(folder)
        if not (record / "measures.json").exists():
            continue
        found = {
            stage: json.loads((run / stage / "model" / "measures.json").read_text("utf-8"))
            for stage in STAGES
        }
        for name, bits in _solutions(run, record).items():
            found["last"][name]["solution"] = bits
        data, arm, seed = run.parts[-3], run.parts[-2], int(run.name.removeprefix("seed-"))
        measures.setdefault(data, {}).setdefault(arm, {})[seed] = found
    return Runs({data: measures[data] for data in ("noisy", "clean") if data in measures})


def _solutions(run: Path, record: Path) -> dict[str, float]:
    """Return bits per byte of solutions by set; none of a run that was not asked."""
    if not (record / "evaluated.json").exists():
        return {}
    asked = json.loads((run / "evaluated" / "last" / "results.json").read_text("utf-8"))
    return {
        name: of_set["solution"]["values"]["bits_per_byte"]["value"]
        for name, of_set in asked["measurements"].items()
    }


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
        return runs.values(data, arm, "bits_per_byte", held_out=held_out)

    def gain(data: str, held_out: str) -> float:
        return -paired(bits(data, TEACHER, held_out), bits(data, "full", held_out))[0]

    def no_worse(arm: str, other: str, held_out: str) -> bool:
        return paired(bits("noisy", arm, held_out), bits("noisy", other, held_out))[0] <= 0

    shrinks = all(gain("clean", name) < gain("noisy", name) for name in MATHEMATICS)
    plain = all(no_worse("full", f"teacher-{k}", n) for k in (0.4, 0.6) for n in CLEAN_SETS)
    chance = any(no_worse("random-0.4", TEACHER, name) for name in MATHEMATICS)
    taste = all(no_worse("teacher_loss-0.4", TEACHER, name) for name in MATHEMATICS)
    return {
        "for": wins(runs) and shrinks,
        "against": plain or chance,
        "against the difference": taste,
        "worth its teacher": _beats(runs, "full-equal-scored"),
    }


def wins(runs: Runs) -> bool:
    """Say whether `teacher` beats chance and plain training: without that nothing is for it."""
    return _beats(runs, "random-0.4") and _beats(runs, "full")


def _beats(runs: Runs, other: str) -> bool:
    own, others = (
        [runs.values("noisy", arm, "bits_per_byte", held_out=name) for name in MATHEMATICS]
        for arm in (TEACHER, other)
    )
    return all(map(better, own, others))


def summarise(runs: Runs) -> dict[str, Any]:
    """Return means, and differences to `full` with their errors, by data, arm, stage and set."""
    return {
        data: {
            arm: {
                "seeds": sorted(seeds),
                **{
                    stage: {
                        held_out: compare(runs, data, (arm, "full"), stage, held_out)
                        for held_out in next(iter(seeds.values()))[stage]
                    }
                    for stage in STAGES
                },
            }
            for arm, seeds in arms.items()
        }
        for data, arms in runs.measures.items()
    }


def compare(
    runs: Runs, data: str, arms: tuple[str, str], stage: str, held_out: str
) -> dict[str, Any]:
    """Return by measure an arm's mean, its difference to another arm, and that one's error."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        own, other = (
            runs.values(data, arm, measure, stage=stage, held_out=held_out) for arm in arms
        )
        if own:
            difference, error = paired(own, other)
            found[measure] = {
                "mean": fmean(own.values()),
                "difference": None if math.isnan(difference) else difference,
                "error": None if math.isnan(error) else error,
            }
    return found


def equal_compute(runs: Runs) -> dict[str, Any]:
    """Return how `teacher` differs from arms that compute as much, after the last stage."""
    arms = [
        arm for arm in ("full-equal-student", "full-equal-scored") if arm in runs.measures["noisy"]
    ]
    return {
        arm: {name: compare(runs, "noisy", (TEACHER, arm), "last", name) for name in _sets(runs)}
        for arm in arms
    }


def _sets(runs: Runs) -> list[str]:
    seeds = next(iter(runs.measures["noisy"].values()))
    return list(next(iter(seeds.values()))["last"])


def kept_after_training(folder: Path) -> dict[str, dict[str, float]]:
    """Return by arm what the teacher's choice would keep of each kind then, the mean over seeds."""
    found: dict[str, list[dict[str, float]]] = {}
    for path in sorted((folder / "runs" / "noisy").glob("*/seed-*/kept.json")):
        own = json.loads(path.read_text("utf-8"))["kept"]["teacher"]
        found.setdefault(path.parts[-3], []).append(own)
    return {
        arm: {kind: fmean(seed[kind] for seed in seeds) for kind in seeds[0]}
        for arm, seeds in found.items()
    }


def timing(folder: Path) -> dict[str, float]:
    """Return every command's seconds by its name."""
    done = folder / DONE
    return {
        str(path.relative_to(done).with_suffix("")): json.loads(path.read_text("utf-8"))["seconds"]
        for path in sorted(done.rglob("*.json"))
    }


def main() -> None:
    """Write the table and the plots."""
    parser = argparse.ArgumentParser(description="Compare the experiment's runs.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs = read_runs(folder)
    if "noisy" not in runs.measures:
        raise SystemExit(f"{folder}: no run is measured yet")
    table = {
        "verdicts": verdicts(runs),
        "wins": wins(runs),
        "arms": summarise(runs),
        "equal_compute": equal_compute(runs),
        "kept_by_teacher_after_training": kept_after_training(folder),
        **{
            name: json.loads((folder / f"{name}.json").read_text("utf-8"))
            for name in ("costs", "rates")
        },
        "gate": json.loads((folder / "kept.json").read_text("utf-8")),
    }
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    (folder / "timing.json").write_text(json.dumps(timing(folder), indent=1) + "\n", "utf-8")
    draw(table["arms"], folder)
    (folder / "table.md").write_text(render(table), "utf-8")


if __name__ == "__main__":
    main()
