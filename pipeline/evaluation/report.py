"""`report.html`: students side by side, with intervals, and their wrong answers to read."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final
from xml.etree.ElementTree import Element

from pipeline.drawing.charts import NOT_DRAWN, Interval, can_draw, draw_svg, interval_chart
from pipeline.drawing.web_page import render_page, tag
from pipeline.evaluation.differences import describe_differences
from pipeline.evaluation.results import RESULTS_FILE, Results, Value, read_results, read_samples
from pipeline.evaluation.sets import SETS
from pipeline.evaluation.summary import describe_results, describe_settings

REPORT_FILE: Final = "report.html"
_SHOWN: Final = 5
"""Wrong answers of each set and student."""

_CHARTS: Final = (
    ("accuracy", "accuracy", "Accuracy"),
    ("solution", "bits_per_byte", "Bits per byte of the worked solution, given the problem"),
    ("text", "bits_per_byte", "Bits per byte of problem and solution"),
    ("answer", "bits_per_byte", "Bits per byte of the bare answer, given the problem"),
    ("options", "bits_per_byte", "Bits per byte of the right option, given the problem"),
    ("options", "accuracy", "Choice by likelihood (dashed: chance)"),
)
_REMARKS: Final = {
    "accuracy": "Below a billion parameters most of these are 0 to 3 %; look at the intervals "
    "before you compare.",
    "solution": "The headline for small students: lower is better, and comparable between "
    "vocabularies.",
    "options": "Less than some hundred million parameters choose no better than chance.",
}
_STYLE: Final = """
figure { margin: 0 0 1.2rem; padding: .6rem; overflow-x: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 .8rem; }
details { margin: .3rem 0; } summary { cursor: pointer; }
.scroll { overflow-x: auto; } .scroll pre { white-space: pre; }
.item { padding: .6rem .9rem; margin: .5rem 0; }
"""


def write_report(output: Path) -> Path:
    """Write the report of every student in a folder; return its path.

    Raises:
        ValueError: a student's results can't be read.

    Example:
        >>> write_report(Path("evaluated"))  # doctest: +SKIP
        PosixPath('evaluated/report.html')
    """
    folders = sorted(path.parent for path in output.glob(f"*/{RESULTS_FILE}"))
    students = {folder: read_results(folder) for folder in folders}
    results = list(students.values())
    page = render_page(
        "Evaluation",
        tag("h1", "Evaluation"),
        tag(
            "p",
            "Points are measured values, bars each student's own 95 % confidence interval. To "
            "compare students look at their differences below: they answered the same items, so "
            "one may be clearly better although the bars overlap.",
            class_="soft",
        ),
        *_charts(results),
        tag("h2", "Values"),
        *_tables(results),
        *_differences(list(students)),
        tag("h2", "Wrong answers"),
        *[part for folder, one in students.items() for part in _wrong(folder, one)],
        style=_STYLE,
    )
    path = output / REPORT_FILE
    path.write_text(page, "utf-8")
    return path


def _charts(results: Sequence[Results]) -> list[Element]:
    if not can_draw():
        return [tag("p", NOT_DRAWN, class_="small soft")]
    parts = []
    told = set()
    for measure, metric, title in _CHARTS:
        named = [name for name in SETS if any(one.find(name, measure, metric) for one in results)]
        if not named:
            continue
        in_bits = metric == "bits_per_byte"
        scale = 1.0 if in_bits else 100.0
        series = {
            one.student: [_ends(one.find(name, measure, metric), scale) for name in named]
            for one in results
        }
        chance = [None if in_bits else _chance(results, name) for name in named]
        chart = interval_chart(
            title,
            [SETS[name].title for name in named],
            series,
            x_label="bits per byte" if in_bits else "right answers, %",
            form=".3f" if in_bits else ".1f",
            marks=chance if measure == "options" else (),
        )
        parts.append(tag("figure", draw_svg(chart), class_="card"))
        if measure in _REMARKS and measure not in told:
            parts.append(tag("p", _REMARKS[measure], class_="small soft"))
        told.add(measure)
    return parts


def _tables(results: Sequence[Results]) -> list[Element]:
    parts = []
    for one in results:
        parts += [
            tag("h3", one.student),
            tag("p", f"{one.source} (files {one.sha256[:12]}…): {describe_settings(one)[0]}"),
            _block(describe_results(one)),
        ]
    return parts


def _differences(folders: Sequence[Path]) -> list[Element]:
    """Return a table for each two students that answered the same items."""
    tables = [describe_differences(*pair) for pair in combinations(folders, 2)]
    blocks = [_block(table) for table in tables if table]
    if not blocks:
        return []
    remark = "With their 95 % intervals, item by item. One in twenty leaves zero out by chance."
    return [tag("h2", "Differences"), tag("p", remark, class_="small soft"), *blocks]


def _block(lines: Sequence[str]) -> Element:
    return tag("div", tag("pre", "\n".join(lines).strip(), class_="mono"), class_="scroll")


def _wrong(folder: Path, results: Results) -> list[Element]:
    parts = []
    for name in (name for name in SETS if name in results.measurements):
        samples = read_samples(folder, name, "accuracy")
        wrong = [sample for sample in samples if not sample["accuracy"]]
        if not wrong:
            continue
        summary = f"{results.student}, {SETS[name].title}: {len(wrong)} of {len(samples)} are wrong"
        shown = [_item(sample) for sample in wrong[:_SHOWN]]
        parts.append(tag("details", tag("summary", summary), *shown))
    return parts


def _item(sample: Mapping[str, Any]) -> Element:
    said = sample["said"] or "(no answer)"
    return tag(
        "div",
        tag("pre", sample["question"]),
        tag("p", tag("b", "right: "), sample["right"], tag("b", "  taken for its answer: "), said),
        tag("pre", sample["text"].strip() or "(nothing)", class_="soft small"),
        class_="card item",
    )


def _ends(value: Value | None, scale: float) -> Interval | None:
    if value is None:
        return None
    return scale * value.low, scale * value.value, scale * value.high


def _chance(results: Sequence[Results], name: str) -> float | None:
    found = [one.find(name, "options", "chance") for one in results]
    return next((100 * value.value for value in found if value), None)
