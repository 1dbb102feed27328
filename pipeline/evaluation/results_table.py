"""A student's table of results."""

from pipeline.drawing.formatting import format_count, format_table
from pipeline.evaluation.results import Measurement, Results, Value
from pipeline.evaluation.sets import CHATS, SETS

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
    """Return a table, with a line per number of items, then notes."""
    measured = [name for name in SETS if name in results.measurements]
    columns = [
        column for column in COLUMNS if any(results.find(name, *column[:2]) for name in measured)
    ]
    rows = [["set", "items", *(heading for _, _, heading in columns)]]
    for name in measured:
        of_set = results.measurements[name]
        nums = {made.num_items for made in of_set.values()}
        for num in sorted(nums - {0} or nums, reverse=True):
            cells = [
                format_value(results.find(name, measure, metric), metric)
                if measure in of_set and of_set[measure].num_items == num
                else "–"
                for measure, metric, _ in columns
            ]
            rows.append([SETS[name].title, format_count(num), *cells])
    return [*format_table(rows, align="<>" + ">" * len(columns)), *_notes(results)]


def describe_measurement(name: str, measure: str, made: Measurement) -> str:
    """Describe a finished step in one line."""
    values = ", ".join(
        f"{heading} {format_value(made.values[metric], metric)}"
        for of, metric, heading in COLUMNS
        if of == measure and metric in made.values
    )
    parts = [part for part in (values, made.note) if part]
    return f"{SETS[name].title}, {measure}, {made.num_items} items: {'; '.join(parts)}"


def format_value(value: Value | None, metric: str) -> str:
    """Return a value with its interval, "–" for what is missing.

    Example:
        >>> format_value(Value(0.689, 0.586, 0.792), "bits_per_byte")
        '0.689 ± 0.103'
        >>> format_value(Value(0.689, 0.689, 0.689), "bits_per_byte")
        '0.689 ± –'
    """
    if value is None:
        return "–"
    if metric == "bits_per_byte":
        half = (value.high - value.low) / 2
        return f"{value.value:.3f} ± {f'{half:.3f}' if half else '–'}"
    if metric == "chance":
        return f"{100 * value.value:.1f}"
    return format_range(value, metric)


def format_range(value: Value, metric: str, *, sign: str = "-", to: str = "–") -> str:
    """Return a value with its interval's ends, shares in percent.

    `sign` "+" shows positive signs, too; `to` separates the ends. Without a width, as of one item,
    it is "–".

    Example:
        >>> format_range(Value(0.029, 0.021, 0.039), "accuracy")
        '2.9 (2.1–3.9)'
    """
    scale, digits = (1, 3) if metric == "bits_per_byte" else (100, 1)
    low, middle, high = (scale * end for end in (value.low, value.value, value.high))
    # Tenths of a point say nothing in an interval of ten.
    at_ends = 0 if metric != "bits_per_byte" and high - low >= 10 else digits
    ends = to.join(f"{end:{sign}.{at_ends}f}" for end in (low, high)) if low < high else "–"
    return f"{middle:{sign}.{digits}f} ({ends})"


def describe_settings(results: Results) -> list[str]:
    """Describe how the student ran; if in several ways, each with its measures."""
    ways: dict[str, list[str]] = {}
    for name, measure, made in results.all():
        way = ", ".join(f"{key} {value}" for key, value in made.settings.items() if value)
        ways.setdefault(way, []).append(f"{SETS[name].title} {measure}")
    return list(ways) if len(ways) == 1 else [f"{way}: {', '.join(of)}" for way, of in ways.items()]


def _notes(results: Results) -> list[str]:
    lines = [
        f"{SETS[name].title}, {measure}: {made.note}"
        for name, measure, made in results.all()
        if made.note
    ]
    other = {
        SETS[name].title
        for name, _, made in results.all()
        if not made.data["as_harness"] and name != CHATS
    }
    if other:
        lines.append(f"a different file from math-evaluation-harness's: {', '.join(sorted(other))}")
    settings = describe_settings(results)
    return [f"note: {line}" for line in (*lines, *(settings if len(settings) > 1 else ()))]
