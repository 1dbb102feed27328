"""Runs of `vocag train` compared: held-out bits per byte by step, as a table and a chart.

A run is named by its folder. Runs of one name are seeds of one method: the table has each of them,
the chart their mean.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from pipeline.drawing.charts import line_chart, write_figure
from pipeline.drawing.formatting import format_table

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
        output: the chart's file; None draws nothing.
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
        chart = line_chart(
            "Held-out bits per byte",
            steps,
            means,
            x_label="step",
            y_label="bits per byte (less is better)",
        )
        write_figure(chart, output)
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
