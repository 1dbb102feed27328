"""`report.html`: students side by side, with intervals."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Final
from xml.etree.ElementTree import Element

from pipeline.drawing.charts import NOT_DRAWN, Interval, can_draw, draw_svg, interval_chart
from pipeline.drawing.web_page import render_page, tag
from pipeline.evaluation.paired_differences import describe_differences
from pipeline.evaluation.results import (
    Results,
    Value,
    read_results,
    replace_file,
    student_folders,
)
from pipeline.evaluation.results_table import describe_results, describe_settings
from pipeline.evaluation.sets import SETS

REPORT_FILE: Final = "report.html"

_CHARTS: Final = (
    ("accuracy", "accuracy", "Accuracy"),
    ("solution", "bits_per_byte", "Bits per byte of the worked solution, given the problem"),
    ("text", "bits_per_byte", "Bits per byte of problem and solution"),
    ("answer", "bits_per_byte", "Bits per byte of the bare answer, given the problem"),
    ("options", "bits_per_byte", "Bits per byte of the right option, given the problem"),
    ("options", "accuracy", "Choice by likelihood (dashed: chance)"),
)
_COMPARE: Final = (
    "Points are measured values, bars each student's own 95 % confidence interval. To compare "
    "students look at their differences below: they answered the same items, so one may be clearly "
    "better although the bars overlap."
)
_STYLE: Final = """
figure { margin: 0 0 1.2rem; padding: .6rem; overflow-x: auto; }
figure svg { width: 100%; min-width: 40rem; }
.scroll { overflow-x: auto; } pre { margin: .2rem 0 .8rem; }
"""


def write_report(output: Path) -> Path:
    """Write the report of a folder's students; return its path; errors as in `read_results`."""
    folders = student_folders(output)
    students = [read_results(folder) for folder in folders]
    page = render_page(
        "Evaluation",
        tag("h1", "Evaluation"),
        tag("p", _COMPARE, class_="soft"),
        *_charts(students),
        tag("h2", "Values"),
        *[part for one in students for part in _values(one)],
        *_differences(folders),
        style=_STYLE,
    )
    path = output / REPORT_FILE
    replace_file(path, page)
    return path


def _charts(results: Sequence[Results]) -> list[Element]:
    if not can_draw():
        return [tag("p", NOT_DRAWN, class_="small soft")]
    parts = []
    for measure, metric, title in _CHARTS:
        named = [name for name in SETS if any(one.find(name, measure, metric) for one in results)]
        if not named:
            continue
        in_bits = metric == "bits_per_byte"
        chance = (_chance(results, name) for name in named)
        chart = interval_chart(
            title,
            [SETS[name].title for name in named],
            {
                one.student: [
                    _interval(one.find(name, measure, metric), 1 if in_bits else 100)
                    for name in named
                ]
                for one in results
            },
            x_label="bits per byte (lower is better)"
            if in_bits
            else "right answers, % (higher is better)",
            form=".3f" if in_bits else ".1f",
            marks=list(chance) if (measure, in_bits) == ("options", False) else (),
        )
        parts.append(tag("figure", draw_svg(chart), class_="card"))
    return parts


def _interval(value: Value | None, scale: float) -> Interval | None:
    return (scale * value.low, scale * value.value, scale * value.high) if value else None


def _chance(results: Sequence[Results], name: str) -> float | None:
    found = (one.find(name, "options", "chance") for one in results)
    return next((100 * value.value for value in found if value), None)


def _values(results: Results) -> list[Element]:
    settings = "; ".join(describe_settings(results))
    return [
        tag("h3", results.student),
        tag("p", f"{results.source} (files {results.sha256[:12]}…): {settings}"),
        _table(describe_results(results)),
    ]


def _differences(folders: Sequence[Path]) -> list[Element]:
    tables = [describe_differences(*pair) for pair in combinations(folders, 2)]
    parts = [_table(table) for table in tables if table]
    if not parts:
        return []
    remark = "With their 95 % intervals, item by item. One in twenty leaves zero out by chance."
    return [tag("h2", "Differences"), tag("p", remark, class_="small soft"), *parts]


def _table(lines: Sequence[str]) -> Element:
    return tag("div", tag("pre", "\n".join(lines).strip(), class_="mono"), class_="scroll")
