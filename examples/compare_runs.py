"""Runs of `vocag train` compared: held-out bits per byte by step, as a table and a chart.

    python examples/compare_runs.py runs/full runs/teacher --output selectors.svg

A run is named by its folder. Runs of one name are seeds of one method: their mean is shown.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from pipeline.drawing.charts import line_chart, require_drawable, write_figure
from pipeline.drawing.formatting import format_table
from pipeline.training.log import LOG_FILE, read_log


def read_run(folder: Path, heldout: str = "") -> dict[int, float]:
    """Return a run's held-out bits per byte by step, of the set of that name.

    Raises:
        ValueError: the run did not measure that.
    """
    name = f"heldout_bits_per_byte/{heldout}".rstrip("/")
    if not (folder / LOG_FILE).is_file():
        raise ValueError(f"{folder} has no {LOG_FILE}, so vocag train didn't write it")
    records = read_log(folder / LOG_FILE)  # of a run that goes on, perhaps
    # Without null: what isn't finite.
    values = {r["step"]: r[name] for r in records if r.get(name) is not None}
    if not values:
        known = sorted({key for record in records for key in record if key.startswith("heldout_")})
        raise ValueError(f"{folder} has no {name}, but {', '.join(known) or 'no held-out values'}")
    return values


def compare_runs(
    folders: Sequence[Path], heldout: str = ""
) -> tuple[list[int], dict[str, list[float]]]:
    """Return the steps at which runs were measured, and the mean values of each name.

    Raises:
        ValueError: runs measured at different steps.
    """
    methods: dict[str, list[dict[int, float]]] = {}
    for folder in folders:
        methods.setdefault(folder.name, []).append(read_run(folder, heldout))
    steps = sorted(methods[folders[0].name][0])
    if any(sorted(run) != steps for runs in methods.values() for run in runs):
        raise ValueError(f"compare runs of equal length: not all were measured at steps {steps}")
    means = {
        name: [fmean(run[step] for run in runs) for step in steps] for name, runs in methods.items()
    }
    return steps, means


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and draw the chart if one is wanted."""
    parser = argparse.ArgumentParser(description="Compare runs of vocag train.")
    parser.add_argument("runs", type=Path, nargs="+", help="folders that vocag train has written")
    parser.add_argument("--heldout", default="", help="name of the held-out set, if it has one")
    parser.add_argument("--output", type=Path, help="also draw it: .svg, .pdf or .png")
    options = parser.parse_args(argv)
    try:
        require_drawable(options.output)
        steps, means = compare_runs(options.runs, options.heldout)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = [[name, *(f"{value:.3f}" for value in values)] for name, values in means.items()]
    table = [["step", *map(str, steps)], *rows]
    print("\n".join(format_table(table, align="<" + ">" * len(steps))))
    if options.output:
        chart = line_chart(
            "Held-out bits per byte",
            steps,
            means,
            x_label="step",
            y_label="bits per byte (lower is better)",
        )
        write_figure(chart, options.output)


if __name__ == "__main__":
    main()
