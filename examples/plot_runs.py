"""Compare runs of `train_hf.py`: held-out bits per byte by step, as a table and a chart.

    python examples/plot_runs.py runs/full runs/random runs/teacher --output selectors.svg

A run is named by its folder.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.figure_charts import Line, line_chart, write_figure
from pipeline.formatting import format_table

COLOURS = 5


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
    runs = {folder.name: read_run(folder) for folder in folders}
    first, *others = runs
    for name in others:
        if runs[name].keys() != runs[first].keys():
            raise ValueError(
                f"{first} was measured at steps {sorted(runs[first])}, {name} at "
                f"{sorted(runs[name])}: compare runs of equal length"
            )
    steps = sorted(runs[first])
    values = [value for run in runs.values() for value in run.values()]
    margin = 0.05 * (max(values) - min(values)) or 0.1
    chart = line_chart(
        "Held-out bits per byte",
        [str(step) for step in steps],
        [
            Line(name, [run[step] for step in steps], number % COLOURS)
            for number, (name, run) in enumerate(runs.items())
        ],
        x=[float(step) for step in steps],
        x_label="step",
        y_label="bits per byte (less is better)",
        y_range=(min(values) - margin, max(values) + margin),
    )
    rows = [["step", *map(str, steps)]]
    rows += [[name, *(f"{run[step]:.3f}" for step in steps)] for name, run in runs.items()]
    table = format_table(rows, align="<" + ">" * len(steps))
    write_figure(chart, output, notes=table)
    return table


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
