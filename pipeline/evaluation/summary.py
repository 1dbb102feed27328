"""The table that a student's evaluation ends with."""

from collections.abc import Sequence

from pipeline.drawing.formatting import format_count, format_table
from pipeline.evaluation.results import Measurement, Results, Value
from pipeline.evaluation.sets import SETS

COLUMNS = (
    ("accuracy", "accuracy", "accuracy %"),
    ("accuracy", "stated", "stated %"),
    ("solution", "bits_per_byte", "solution b/B"),
    ("text", "bits_per_byte", "text b/B"),
    ("answer", "bits_per_byte", "answer b/B"),
    ("options", "bits_per_byte", "option b/B"),
    ("options", "accuracy", "choice %"),
    ("options", "chance", "chance %"),
)
"""Measure, metric and heading: accuracies in percent, code lengths in bits per byte."""


def describe_results(results: Results) -> list[str]:
    """Return a table of values with half the width of their 95 % intervals, then the notes.

    Example:
        >>> describe_results(results)[0].split()[:2]
        ['set', 'items']
    """
    measured = [name for name in SETS if name in results.measurements]
    columns = [
        column for column in COLUMNS if any(_find(results, name, *column[:2]) for name in measured)
    ]
    rows = [["set", "items", *(heading for _, _, heading in columns)]]
    for name in measured:
        cells = [format_value(_find(results, name, *column[:2]), column[1]) for column in columns]
        items = max(made.num_items for made in results.measurements[name].values())
        rows.append([SETS[name].title, format_count(items), *cells])
    return [*format_table(rows, align="<>" + ">" * len(columns)), *_notes(results, measured)]


def describe_measurement(name: str, measure: str, made: Measurement) -> str:
    """Return a finished step in one line."""
    values = ", ".join(
        f"{heading} {format_value(made.values[metric], metric)}"
        for of, metric, heading in COLUMNS
        if of == measure and metric in made.values
    )
    parts = [part for part in (values, made.note) if part]
    return f"{SETS[name].title}, {measure}, {made.num_items} items: {'; '.join(parts)}"


def format_value(value: Value | None, metric: str) -> str:
    """Return a value with its margin, "–" where there is none.

    Example:
        >>> format_value(Value(0.25, 0.1, 0.4), "accuracy")
        '25.0 ± 15.0'
    """
    if value is None:
        return "–"
    if metric == "bits_per_byte":
        return f"{value.value:.3f} ± {value.margin:.3f}"
    if metric == "chance":
        return f"{100 * value.value:.1f}"
    return f"{100 * value.value:.1f} ± {100 * value.margin:.1f}"


def _find(results: Results, name: str, measure: str, metric: str) -> Value | None:
    made = results.measurements[name].get(measure)
    return made.values.get(metric) if made else None


def _notes(results: Results, measured: Sequence[str]) -> list[str]:
    """Return what a reader must know of the numbers."""
    lines = [
        f"{SETS[name].title}, {measure}: {made.note}"
        for name in measured
        for measure, made in results.measurements[name].items()
        if made.note
    ]
    every = [made for name in measured for made in results.measurements[name].values()]
    if any(made.shots == "vocag" for made in every):
        lines.append(
            "worked examples of the sets by letter are our own, not math-evaluation-harness's: "
            "give --prompts for its"
        )
    other = [SETS[name].title for name in measured if not _is_as_harness(results, name)]
    if other:
        lines.append(f"another file than math-evaluation-harness's: {', '.join(other)}")
    return [f"note: {line}" for line in lines]


def _is_as_harness(results: Results, name: str) -> bool:
    return all(made.data.get("as_harness") for made in results.measurements[name].values())
