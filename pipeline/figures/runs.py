"""Runs of `vocag train` compared: held-out bits per byte by step, as a table and a chart.

A run is named by its folder. Runs of one name are seeds of one method: the table has each of them,
the chart their mean.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from xml.etree.ElementTree import Element

from pipeline.drawing.charts import Line, line_chart, write_figure
from pipeline.drawing.formatting import format_table

COLOURS = 5
TICKS = 5


_METRIC = "heldout_bits_per_byte"


def read_run(folder: Path, heldout: str = "") -> dict[int, float]:
    """Return a run's held-out bits per byte by step.

    Args:
        folder: the run's.
        heldout: name of the held-out set, where the run has several.

    Raises:
        ValueError: the run did not measure that.
    """
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    name = f"{_METRIC}/{heldout}" if heldout else _METRIC
    values = {record["step"]: record[name] for record in records if name in record}
    if not values:
        found = sorted({key for record in records for key in record if key.startswith(_METRIC)})
        sets = [
            key.removeprefix(_METRIC).lstrip("/") or "(one set, without a name)" for key in found
        ]
        known = f"it measured {', '.join(sets)}: see --heldout" if sets else "train with --heldout"
        raise ValueError(
            f"{folder} has no held-out measurements {heldout or 'of one set'}: {known}"
        )
    return values


def compare_runs(
    folders: Sequence[Path], output: Path | None = None, *, heldout: str = ""
) -> list[str]:
    """Draw runs that were measured at the same steps; return a table.

    Args:
        folders: of the runs.
        output: .svg or .html file; None draws nothing.
        heldout: as in `read_run`.

    Raises:
        ValueError: runs measured at different steps.
    """
    runs = {folder: read_run(folder, heldout) for folder in folders}
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
    if output is not None:
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
