"""The report's histograms, each with its exact values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final
from xml.etree.ElementTree import Element

from pipeline.alignment.quality import LENGTH_EDGES, AlignmentStatistics
from pipeline.drawing.charts import NOT_DRAWN, bar_chart, can_draw, draw_svg
from pipeline.drawing.formatting import format_count, format_share
from pipeline.drawing.web_page import tag

STYLE: Final = """
figure { margin: 0; padding: 1rem 1.1rem .8rem; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .1rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr));
  gap: .8rem; }
"""


def draw_histograms(statistics: AlignmentStatistics, *more: Element) -> list[Element]:
    """A figure for each histogram, and `more`; without matplotlib, tables."""
    spans = list(map(int, statistics.span_width_counts))
    lengths = list(map(format_count, LENGTH_EDGES))
    figures = [
        _figure(
            "Document length",
            lengths[: len(statistics.student_length_counts)],
            _both(statistics.student_length_counts, statistics.teacher_length_counts),
            x_label="tokens per document (from)",
            what="documents",
            # Whole octaves are round numbers, the bins between them aren't.
            ticks=[format_count(edge) for edge in LENGTH_EDGES if edge & (edge - 1) == 0],
        ),
        _figure(
            "Teacher tokens per student token",
            _up_to(len(spans)),
            {"student": spans},
            x_label="width of the span; 0 = unmapped",
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
    return [*remark, tag("div", *figures, *more, class_="charts")]


def _figure(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[int]],
    *,
    x_label: str,
    what: str,
    ticks: Collection[str] = (),
) -> Element:
    wholes = {name: sum(counts) for name, counts in series.items()}
    labels, series = _trim(labels, series)
    heading = [x_label, *(cell for name in series for cell in (f"{name} {what}", "share"))]
    body = [[label] for label in labels]
    for name, counts in series.items():
        for cells, count in zip(body, counts, strict=True):
            cells += [format_count(count), format_share(count, wholes[name])]
    values = table(heading, body)
    if not can_draw():
        return tag("figure", tag("figcaption", title), values, class_="card")
    shares = {name: [n / (wholes[name] or 1) for n in counts] for name, counts in series.items()}
    y_label = f"share of {what}"
    chart = bar_chart(title, labels, shares, x_label=x_label, y_label=y_label, ticks=ticks)
    hidden = tag("details", tag("summary", "values"), values)
    return tag("figure", draw_svg(chart), hidden, class_="card")


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    """Make a table whose first column is text and the others numbers."""

    def row(cells: Sequence[str], kind: str) -> Element:
        numbers = (tag(kind, cell, class_="number") for cell in cells[1:])
        return tag("tr", tag(kind, cells[0], class_="fact"), *numbers)

    body = tag("tbody", *(row(cells, "td") for cells in rows))
    return tag("div", tag("table", tag("thead", row(heading, "th")), body), class_="scroll")


def _trim(
    labels: Sequence[str], series: Mapping[str, Sequence[int]]
) -> tuple[Sequence[str], dict[str, Sequence[int]]]:
    used = [bar for bar, counts in enumerate(zip(*series.values(), strict=True)) if any(counts)]
    first, last = (used[0], used[-1] + 1) if used else (0, 1)
    shown = slice(first if first > 2 else 0, last)
    return labels[shown], {name: counts[shown] for name, counts in series.items()}


def _both(student: Iterable[int], teacher: Iterable[int]) -> dict[str, list[int]]:
    return {"student": list(map(int, student)), "teacher": list(map(int, teacher))}


def _up_to(num_bars: int) -> list[str]:
    return [*map(str, range(num_bars - 1)), f"{num_bars - 1}+"]
