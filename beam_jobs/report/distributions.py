"""The report's histograms: a picture of the shares, and under it a table of the exact values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from xml.etree.ElementTree import Element

from pipeline.alignment.quality import LENGTH_EDGES, AlignmentStatistics
from pipeline.drawing.charts import NOT_DRAWN, bar_chart, can_draw, draw_svg
from pipeline.drawing.formatting import format_count, format_share, format_short
from pipeline.drawing.web_page import tag

STYLE: Final = """
figure { margin: 0; padding: 1rem 1.1rem .8rem; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .1rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr));
  gap: .8rem; }
"""


@dataclass(frozen=True)
class Counts:
    """One set of bars.

    Attributes:
        name: "student" or "teacher".
        counts: one count per bar.
        total: what shares are of, where the bars are not all there is; 0 for the bars' sum.
    """

    name: str
    counts: Sequence[int]
    total: int = 0

    @property
    def whole(self) -> int:
        """What the shares are of."""
        return self.total or sum(self.counts)


def draw_distributions(statistics: AlignmentStatistics) -> list[Element]:
    """Return a figure of each distribution; without matplotlib its table, and a remark."""
    spans = list(map(int, statistics.span_width_counts))
    widths = _up_to(len(spans))
    width_label = "width of the span; 0 = unmapped"
    lengths = [format_short(edge).replace(" ", "") for edge in LENGTH_EDGES]
    figures = [
        _figure(
            "Document length",
            lengths[: len(statistics.student_length_counts)],
            _both(statistics.student_length_counts, statistics.teacher_length_counts),
            x_label="tokens per document (from)",
            what="documents",
        ),
        _figure(
            "Teacher tokens per student token",
            widths,
            [Counts("student", spans)],
            x_label=width_label,
            what="student tokens",
        ),
        _figure(
            "The same, without spans of one",
            [widths[0], *widths[2:]],
            [Counts("student", [spans[0], *spans[2:]], sum(spans))],
            x_label=width_label,
            what="student tokens",
        ),
        _figure(
            "Bytes per token",
            _up_to(len(statistics.student_token_bytes_counts)),
            _both(statistics.student_token_bytes_counts, statistics.teacher_token_bytes_counts),
            x_label="bytes of text that a token covers",
            what="tokens",
        ),
    ]
    remark = [] if can_draw() else [tag("p", NOT_DRAWN, class_="soft small")]
    return [*remark, tag("div", *figures, class_="charts")]


def _figure(
    title: str, labels: Sequence[str], series: Sequence[Counts], *, x_label: str, what: str
) -> Element:
    labels, series = _trim(labels, series)
    values = _values(labels, series, x_label, what)
    if not can_draw():
        return tag("figure", tag("figcaption", title), values, class_="card")
    shares = {one.name: [count / (one.whole or 1) for count in one.counts] for one in series}
    chart = bar_chart(title, labels, shares, x_label=x_label, y_label=f"share of {what}")
    table = tag("details", tag("summary", "values"), values)
    return tag("figure", draw_svg(chart), table, class_="card")


def _values(labels: Sequence[str], series: Sequence[Counts], x_label: str, what: str) -> Element:
    heading = [x_label, *(part for one in series for part in (f"{one.name} {what}", "share"))]
    body = []
    for i, label in enumerate(labels):
        cells = [label]
        for one in series:
            cells += [format_count(one.counts[i]), format_share(one.counts[i], one.whole)]
        body.append(_row(cells, "td"))
    table = tag("table", tag("thead", _row(heading, "th")), tag("tbody", *body))
    return tag("div", table, class_="scroll")


def _row(cells: Sequence[str], kind: str) -> Element:
    return tag("tr", *(tag(kind, cell, class_="number") for cell in cells))


def _trim(
    labels: Sequence[str], series: Sequence[Counts]
) -> tuple[Sequence[str], Sequence[Counts]]:
    """Drop empty bars at both ends; the bar of zero stays where it leads."""
    used = [i for i in range(len(labels)) if any(one.counts[i] for one in series)]
    first, last = (used[0], used[-1] + 1) if used else (0, min(1, len(labels)))
    if first <= 2:
        first = 0
    return labels[first:last], [
        replace(one, counts=one.counts[first:last], total=one.whole) for one in series
    ]


def _both(student: Iterable[int], teacher: Iterable[int]) -> list[Counts]:
    return [Counts("student", list(map(int, student))), Counts("teacher", list(map(int, teacher)))]


def _up_to(num_bars: int) -> list[str]:
    """Return the bars' numbers; the last holds all that is larger."""
    return [*map(str, range(num_bars - 1)), f"{num_bars - 1}+"]
