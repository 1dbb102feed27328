"""Compare runs of `train_hf.py`: held-out bits per byte by step, as a table and a chart.

    python examples/plot_runs.py runs/full runs/random runs/teacher --output selectors.svg
    python examples/plot_runs.py runs/seed-*/* --output selectors.svg

A run is named by its folder. Runs of one name are seeds of one method: the table has each of them,
the chart their mean.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from xml.etree.ElementTree import Element

from pipeline.figure_charts import Line, line_chart, write_figure
from pipeline.formatting import format_table

COLOURS = 5
TICKS = 5


def read_run(folder: Path) -> dict[int, float]:
    """Return a run's held-out bits per byte by step.

    Raises:
        ValueError: the run measured nothing.
    """
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    name = "heldout_bits_per_byte"
    values = {record["step"]: record[name] for record in records if name in record}
    if not values:
        raise ValueError(f"{folder} has no held-out measurements: train with --heldout")
    return values


def compare_runs(folders: Sequence[Path], output: Path) -> list[str]:
    """Draw runs that were measured at the same steps; return a table.

    Raises:
        ValueError: runs measured at different steps.
    """
    runs = {folder: read_run(folder) for folder in folders}
    first, *others = runs
    for folder in others:
        if runs[folder].keys() != runs[first].keys():
            raise ValueError(
                f"{first} was measured at steps {sorted(runs[first])}, {folder} at "
                f"{sorted(runs[folder])}: compare runs of equal length"
            )
    steps = sorted(runs[first])
    methods: dict[str, list[list[float]]] = {}
    for folder, run in runs.items():
        methods.setdefault(folder.name, []).append([run[step] for step in steps])
    means = {
        name: [fmean(values) for values in zip(*seeds, strict=True)]
        for name, seeds in methods.items()
    }
    table = _table(steps, methods, means)
    write_figure(_chart(steps, means), output, notes=table)
    return table


def _table(
    steps: Sequence[int], methods: dict[str, list[list[float]]], means: dict[str, list[float]]
) -> list[str]:
    rows = [["step", *map(str, steps)]]
    for name, seeds in methods.items():
        # Of one run, the mean says nothing more.
        labelled = [(name, seeds[0])]
        if len(seeds) > 1:
            labelled = [(f"{name}, {n}", seed) for n, seed in enumerate(seeds, start=1)]
            labelled.append((f"{name}, mean", means[name]))
        rows += [[label, *(f"{value:.3f}" for value in values)] for label, values in labelled]
    return format_table(rows, align="<" + ">" * len(steps))


def _chart(steps: Sequence[int], means: dict[str, list[float]]) -> Element:
    return line_chart(
        "Held-out bits per byte",
        [str(step) for step in steps],
        [Line(name, line, n % COLOURS) for n, (name, line) in enumerate(means.items())],
        x=[float(step) for step in steps],
        x_label="step",
        y_label="bits per byte (less is better)",
        y_range=_round_range([value for line in means.values() for value in line]),
    )


def _round_range(values: Sequence[float]) -> tuple[float, float]:
    """Return an axis of five equal steps, each a round number, that holds all values.

    Example:
        >>> _round_range([2.58, 3.72])
        (2.5, 3.75)
    """
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0):
        low = math.floor(min(values) / step) * step
        if low + TICKS * step >= max(values):
            break
    return round(low, 2), round(low + TICKS * step, 2)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="Compare runs of train_hf.py.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", required=True, type=Path, help=".svg or .html file")
    options = parser.parse_args()
    try:
        print("\n".join(compare_runs(options.runs, options.output)))
    except (ValueError, OSError) as error:
        print(f"plot_runs: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
