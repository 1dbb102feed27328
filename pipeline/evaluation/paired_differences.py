"""Compare two students on items that both answered.

An item's difficulty cancels, so intervals are much narrower than each student's own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.drawing.formatting import format_count, format_table
from pipeline.evaluation.results import (
    Results,
    Value,
    bits_difference,
    read_results,
    read_samples,
    share_difference,
)
from pipeline.evaluation.results_table import COLUMNS, format_range
from pipeline.evaluation.sets import SETS

Sample = Mapping[str, Any]


def describe_differences(folder: Path, other: Path) -> list[str]:
    """Tabulate one folder's values minus another's; errors as in `read_results`."""
    one, two = read_results(folder), read_results(other)
    rows = []
    for name in SETS:
        cells: dict[int, dict[str, str]] = {}
        for measure, metric, heading in COLUMNS:
            if metric == "chance" or not _is_comparable(one, two, name, measure):
                continue
            places = {sample["place"]: sample for sample in read_samples(other, name, measure)}
            ours = read_samples(folder, name, measure)
            pairs = [(mine, places[mine["place"]]) for mine in ours if mine["place"] in places]
            if pairs:
                value = format_range(difference(pairs, metric), metric, sign="+", to=" to ")
                cells.setdefault(len(pairs), {})[heading] = value
        rows += [(SETS[name].title, num, found) for num, found in cells.items()]
    if not rows:
        return []
    headings = [head for _, _, head in COLUMNS if any(head in found for _, _, found in rows)]
    lines = [["set", "items", *headings]]
    for title, num, found in rows:
        lines.append([title, format_count(num), *(found.get(head, "–") for head in headings)])
    table = format_table(lines, align="<>" + ">" * len(headings))
    heading = f"{one.student} less {two.student}, on the items that both answered:"
    return ["", heading, *table]


def difference(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> Value:
    """Return a metric's difference over pairs of samples of one item."""
    values = [(one[metric], other[metric]) for one, other in pairs]
    if metric == "bits_per_byte":
        return bits_difference(values)
    return share_difference(values)


def _is_comparable(one: Results, other: Results, name: str, measure: str) -> bool:
    """Whether equal places mean equal items."""
    made = [results.measurements.get(name, {}).get(measure) for results in (one, other)]
    files = [measurement.data.get("sha256") for measurement in made if measurement]
    return len(files) == 2 and files[0] == files[1]
