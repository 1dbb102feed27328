"""Two students on the items that both answered: differences, item by item, with intervals.

What makes an item hard is hard for both, and leaves with the difference: intervals of differences
are much narrower than each student's own, which may overlap though one is better nearly everywhere.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.drawing.formatting import format_count, format_table
from pipeline.evaluation.results import (
    RESULTS_FILE,
    Results,
    Value,
    bits_per_byte,
    read_results,
    read_samples,
    share_difference,
)
from pipeline.evaluation.sets import SETS
from pipeline.evaluation.summary import COLUMNS, format_range

Sample = Mapping[str, Any]


def other_students(output: Path, student: str) -> list[str]:
    """Return the names of the other students with results in a folder."""
    found = sorted(path.parent.name for path in output.glob(f"*/{RESULTS_FILE}"))
    return [name for name in found if name != student]


def describe_differences(folder: Path, other: Path) -> list[str]:
    """Return a table of one student's values less another's, on the items that both answered.

    Args:
        folder: of the one's results.
        other: of the other's.

    Raises:
        ValueError: results that can't be read.

    Example:
        >>> describe_differences(Path("out/full"), Path("out/teacher"))  # doctest: +SKIP
    """
    one, two = read_results(folder), read_results(other)
    rows = []
    for name in SETS:
        cells: dict[int, dict[str, str]] = {}
        for measure, metric, heading in COLUMNS:
            if metric == "chance" or not _is_comparable(one, two, name, measure):
                continue
            pairs = _pairs(*(read_samples(of, name, measure) for of in (folder, other)))
            if pairs:
                value = difference(pairs, metric)
                cells.setdefault(len(pairs), {})[heading] = format_difference(value, metric)
        rows += [(SETS[name].title, num, found) for num, found in cells.items()]
    if not rows:
        return []
    headings = [head for _, _, head in COLUMNS if any(head in found for _, _, found in rows)]
    lines = [["set", "items", *headings]]
    for title, num, found in rows:
        lines.append([title, format_count(num), *(found.get(head, "–") for head in headings)])
    table = format_table(lines, align="<>" + ">" * len(headings))
    heading = f"{one.student} less {two.student}, on the items that both answered:"
    return ["", heading, *table, *_unlike(one, two)]


def difference(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> Value:
    """Return a metric's difference over pairs of samples of one item.

    Example:
        >>> pair = {"bits_per_byte": (-6.931, 10)}, {"bits_per_byte": (-13.863, 10)}
        >>> round(difference([pair], "bits_per_byte").value, 3)
        -1.0
    """
    values = [(one[metric], other[metric]) for one, other in pairs]
    if metric == "bits_per_byte":
        return bits_per_byte([(one[0] - other[0], one[1]) for one, other in values])
    return share_difference(values)


def format_difference(value: Value, metric: str) -> str:
    """Return a signed difference with its interval.

    Example:
        >>> format_difference(Value(-0.0312, -0.0498, -0.0126), "bits_per_byte")
        '-0.031 (-0.050 to -0.013)'
    """
    return format_range(value, metric, sign="+", to=" to ")


def _is_comparable(one: Results, other: Results, name: str, measure: str) -> bool:
    """Return whether the same places are the same items: those of one file."""
    made = [results.measurements.get(name, {}).get(measure) for results in (one, other)]
    files = [measurement.data.get("sha256") for measurement in made if measurement]
    return len(files) == 2 and files[0] == files[1]


def _unlike(one: Results, other: Results) -> list[str]:
    """Return notes on what differs beside the students."""
    found: dict[str, list[str]] = {}
    for name, measure, made in one.all():
        if _is_comparable(one, other, name, measure):
            own, its = (
                {**of.settings, "answer_tokens": of.answer_tokens}
                for of in (made, other.measurements[name][measure])
            )
            for key in ("dtype", "device", "answer_tokens"):
                if own[key] != its[key]:
                    note = f"{key} {own[key]} and {its[key]}"
                    found.setdefault(note, []).append(f"{SETS[name].title} {measure}")
    return [f"note: {note}: {', '.join(where)}" for note, where in found.items()]


def _pairs(ones: Sequence[Sample], others: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    by_place = {sample["place"]: sample for sample in others}
    return [(one, by_place[one["place"]]) for one in ones if one["place"] in by_place]
