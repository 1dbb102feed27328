"""Bar charts as inline SVG: axes with labels, exact values on hover and in a table beneath."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

from pipeline.drawing.formatting import format_count, format_share
from pipeline.drawing.web_page import tag

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 12, 46

CHART_STYLE = """
figure { margin: 0; padding: 1rem 1.1rem .8rem; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .1rem; }
.legend { display: flex; gap: 1rem; font-size: .82rem; color: var(--soft); margin: 0 0 .3rem; }
.legend i { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem;
  margin-right: .35rem; background: currentColor; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11.5px system-ui, sans-serif; fill: var(--soft); }
svg .axis { stroke: var(--soft); } svg .grid { stroke: var(--line); }
svg rect.student { fill: var(--student); } svg rect.teacher { fill: var(--teacher); }
svg rect:hover { opacity: .75; }
"""


@dataclass(frozen=True)
class Series:
    """One set of bars.

    Attributes:
        name: "student" or "teacher"; decides the colour.
        counts: one count per bar.
        total: what shares are of, where the bars are not all there is; 0 for the bars' sum.
    """

    name: str
    counts: Sequence[int]
    total: int = 0

    def share(self, bar: int) -> float:
        """Return a bar's share, 0 to 1."""
        total = self.total or sum(self.counts)
        return self.counts[bar] / total if total else 0.0

    def describe(self, bar: int) -> tuple[str, str]:
        """Return a bar's count and share in words."""
        return format_count(self.counts[bar]), format_share(self.share(bar), 1)


def bar_chart(
    title: str, labels: Sequence[str], series: Sequence[Series], *, x_label: str, what: str
) -> Element:
    """Return a figure: bars of each series side by side, as shares.

    Args:
        title: the figure's caption.
        labels: one label per bar.
        series: one or two sets of bars, each as long as `labels`.
        x_label: what the bars are, with its unit.
        what: what is counted, for the axis and the table.
    """
    labels, series = _trim(labels, series)
    top = _nice_ceiling(max((s.share(i) for s in series for i in range(len(labels))), default=0))
    svg = tag(
        "svg",
        *_y_axis(top, f"share of {what}"),
        *_bars(labels, series, top),
        *_x_axis(labels, x_label),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}: bar chart; the values are in the table below",
    )
    return tag(
        "figure",
        tag("figcaption", title),
        _legend(series) if len(series) > 1 else tag("span"),
        svg,
        _values(labels, series, x_label, what),
        class_="card",
    )


def _trim(
    labels: Sequence[str], series: Sequence[Series]
) -> tuple[Sequence[str], Sequence[Series]]:
    """Drop empty bars at both ends; the bar of zero stays where it leads."""
    used = [i for i in range(len(labels)) if any(s.counts[i] for s in series)]
    first, last = (used[0], used[-1] + 1) if used else (0, min(1, len(labels)))
    if first <= 2:
        first = 0
    return labels[first:last], [
        replace(s, counts=s.counts[first:last], total=s.total or sum(s.counts)) for s in series
    ]


def _nice_ceiling(value: float) -> float:
    """Return the next 1, 2, 4, 5 or 10 times a power of ten: four ticks divide it evenly."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (step for step in (1, 2, 4, 6, 8, 10) if step * power >= value * 0.9999)
    return min(1.0, next(steps) * power)


def _x(position: float, num_bars: int) -> float:
    return LEFT + position * (WIDTH - LEFT - RIGHT) / max(num_bars, 1)


def _y(share: float, top: float) -> float:
    return TOP + (1 - share / top) * (HEIGHT - TOP - BOTTOM)


def _y_axis(top: float, label: str) -> list[Element]:
    parts = []
    digits = max(0, 1 - math.floor(math.log10(100 * top))) if top < 0.1 else 0
    for tick in range(5):
        share = top * tick / 4
        y = f"{_y(share, top):.1f}"
        kind = "axis" if tick == 0 else "grid"
        parts.append(tag("line", x1=f"{LEFT}", x2=f"{WIDTH - RIGHT}", y1=y, y2=y, class_=kind))
        text = f"{100 * share:.{digits}f} %"
        parts.append(tag("text", text, x=f"{LEFT - 6}", y=y, dy="0.35em", text_anchor="end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turn = f"rotate(-90 11 {middle:g})"
    parts.append(tag("text", label, x="11", y=f"{middle:g}", transform=turn, text_anchor="middle"))
    return parts


def _x_axis(labels: Sequence[str], label: str) -> list[Element]:
    every = max(1, math.ceil(len(labels) * max(map(len, labels), default=1) * 7.5 / 480))
    parts = [
        tag(
            "text",
            text,
            x=f"{_x(i + 0.5, len(labels)):.1f}",
            y=f"{HEIGHT - BOTTOM + 16}",
            text_anchor="middle",
        )
        for i, text in enumerate(labels)
        if i % every == 0
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", label, x=f"{middle:g}", y=f"{HEIGHT - 7}", text_anchor="middle"))
    return parts


def _bars(labels: Sequence[str], series: Sequence[Series], top: float) -> list[Element]:
    parts = []
    thick = 0.82 / len(series)
    for n, one in enumerate(series):
        for i, label in enumerate(labels):
            left = _x(i + 0.09 + n * thick, len(labels))
            height = max(_y(0, top) - _y(one.share(i), top), 0.75 if one.counts[i] else 0)
            hint = "{} {}: {} ({})".format(one.name, label, *one.describe(i))
            parts.append(
                tag(
                    "rect",
                    tag("title", hint),
                    x=f"{left:.1f}",
                    y=f"{_y(0, top) - height:.2f}",
                    width=f"{_x(i + 0.09 + (n + 1) * thick, len(labels)) - left - 0.4:.1f}",
                    height=f"{height:.2f}",
                    class_=one.name,
                )
            )
    return parts


def _legend(series: Sequence[Series]) -> Element:
    items = [tag("span", tag("i", class_=one.name), one.name) for one in series]
    return tag("div", *items, class_="legend")


def _values(labels: Sequence[str], series: Sequence[Series], x_label: str, what: str) -> Element:
    heading = [x_label, *(part for one in series for part in (f"{one.name} {what}", "share"))]
    body = []
    for i, label in enumerate(labels):
        cells = [label]
        for one in series:
            cells += one.describe(i)
        body.append(_row(cells, "td"))
    table = tag("table", tag("thead", _row(heading, "th")), tag("tbody", *body))
    return tag("details", tag("summary", "values"), tag("div", table, class_="scroll"))


def _row(cells: Sequence[str], kind: str) -> Element:
    return tag("tr", *(tag(kind, cell, class_="number") for cell in cells))
