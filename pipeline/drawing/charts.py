"""Small charts as SVG: bars, lines and histograms with exact values, light and dark, any viewer.

Bars and lines carry their own style, so that they look the same in a file, a README and a page.
A histogram is part of a page, in the page's colours, and has its values in a table beneath it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pipeline.drawing.formatting import format_count, format_share
from pipeline.drawing.web_page import render_page, tag

WIDTH: Final = 720
# Left of the plot stand labels of bars (long) or of the axis (short).
BAR_LEFT, BAR_RIGHT, BAR_HEIGHT, GROUP_GAP = 170, 70, 17, 16
LINE_LEFT, LINE_RIGHT, LINE_TOP, LINE_BOTTOM, LINE_HEIGHT = 62, 150, 58, 52, 380
SLOT: Final = 14
HIST_WIDTH, HIST_HEIGHT = 560, 270
HIST_LEFT, HIST_RIGHT, HIST_TOP, HIST_BOTTOM = 58, 10, 12, 46

_STYLE: Final = """
svg { background: #ffffff; }
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2127; }
text.soft { fill: #5c6470; } text.title { font-weight: 600; font-size: 15px; }
line.grid { stroke: #e2e3e0; } line.axis { stroke: #5c6470; }
.s0 { color: #2563b8; } .s1 { color: #c2681a; } .s2 { color: #1f7a4d; } .s3 { color: #8b3fa8; }
.s4 { color: #5c6470; }
rect, circle, text.name { fill: currentColor; }
polyline, line.level { fill: none; stroke: currentColor; stroke-width: 2; }
line.level { stroke-dasharray: 6 4; }
@media (prefers-color-scheme: dark) {
  svg { background: #14161a; } text { fill: #e7e9ec; } text.soft { fill: #9aa3af; }
  line.grid { stroke: #2e333b; } line.axis { stroke: #9aa3af; }
  .s0 { color: #76a9f0; } .s1 { color: #eda35d; } .s2 { color: #66c796; } .s3 { color: #d19be6; }
  .s4 { color: #9aa3af; }
}
"""

HISTOGRAM_STYLE: Final = """
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
class Line:
    """One line of a chart.

    Attributes:
        name: stands at the line's end.
        y: one value per x, in the axis' unit.
        colour: 0 to 4.
        level: draw a dashed line at the last value over the whole width instead of points.
    """

    name: str
    y: Sequence[float]
    colour: int
    level: bool = False


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


def bar_chart(title: str, groups: Sequence[str], series: dict[str, Sequence[float]]) -> Element:
    """Return horizontal bars of percentages, one bar of each series in every group.

    Args:
        title: what is shown.
        groups: the groups' labels.
        series: by name, one percentage (0 to 100) per group.

    Example:
        >>> bar_chart("overlap", ["qwen2_5"], {"raw": [6.32], "decoded": [17.42]}).tag
        'svg'
    """
    group_height = len(series) * BAR_HEIGHT + GROUP_GAP
    top = 64
    height = top + len(groups) * group_height + 6
    largest = max((max(values) for values in series.values()), default=0) or 1
    scale = (WIDTH - BAR_LEFT - BAR_RIGHT) / largest
    parts = [_text(title, 14, 26, class_="title"), *_legend(list(series), 14, 48)]
    for g, group in enumerate(groups):
        y = top + g * group_height
        middle = y + len(series) * BAR_HEIGHT / 2
        parts.append(_text(group, BAR_LEFT - 10, middle, text_anchor="end", dy="0.35em"))
        for s, (name, values) in enumerate(series.items()):
            width = max(values[g] * scale, 1)
            bar = _box(BAR_LEFT, y + s * BAR_HEIGHT + 1, width, BAR_HEIGHT - 2, f"s{s}")
            bar.append(tag("title", f"{group}, {name}: {values[g]:.2f} %"))
            place = y + (s + 0.5) * BAR_HEIGHT
            label = _text(f"{values[g]:.2f} %", BAR_LEFT + width + 6, place, dy="0.35em")
            parts += [bar, label]
    return _svg(parts, height, title)


def line_chart(
    title: str,
    x_labels: Sequence[str],
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float],
    x: Sequence[float] | None = None,
) -> Element:
    """Return lines over a common x axis, each named at its end.

    Args:
        title: what is shown.
        x_labels: one per x.
        lines: each with as many values as there are labels.
        x_label: of the axis, with its unit.
        y_label: likewise.
        y_range: the axis' ends.
        x: where the labels stand, increasing; None: evenly.

    Example:
        >>> line_chart("loss", ["1", "2"], [Line("full", [3, 2], 0)], x_label="step",
        ...            y_label="nats", y_range=(0, 4)).tag
        'svg'
    """
    places = list(x) if x is not None else [float(i) for i in range(len(x_labels))]
    left, right = LINE_LEFT, WIDTH - LINE_RIGHT
    span = (places[-1] - places[0]) or 1.0
    xs = [left + (place - places[0]) / span * (right - left) for place in places]
    low, high = y_range

    def y_of(value: float) -> float:
        return LINE_TOP + (high - value) / (high - low) * (LINE_HEIGHT - LINE_TOP - LINE_BOTTOM)

    parts = [_text(title, 14, 26, class_="title"), _text(y_label, 14, 46, class_="soft")]
    for tick in range(6):
        value = low + (high - low) * tick / 5
        parts.append(_line(left, y_of(value), right, y_of(value), "grid" if tick else "axis"))
        parts.append(_text(f"{value:.3g}", left - 8, y_of(value), text_anchor="end", dy="0.35em"))
    for at, label in zip(xs, x_labels, strict=True):
        parts.append(_text(label, at, LINE_HEIGHT - 32, text_anchor="middle"))
    middle = (left + right) / 2
    parts.append(_text(x_label, middle, LINE_HEIGHT - 10, text_anchor="middle", class_="soft"))
    names = _spread([y_of(line.y[-1]) for line in lines])
    for line, name_y in zip(lines, names, strict=True):
        parts += _draw(line, xs, [y_of(value) for value in line.y], x_labels)
        parts.append(
            _text(line.name, right + 10, name_y, dy="0.35em", class_=f"name s{line.colour}")
        )
    return _svg(parts, LINE_HEIGHT, title)


def histogram(
    title: str, labels: Sequence[str], series: Sequence[Series], *, x_label: str, what: str
) -> Element:
    """Return a figure of a page with `HISTOGRAM_STYLE`: bars side by side, as shares.

    Args:
        title: the figure's caption.
        labels: one label per bar.
        series: one or two sets of bars, each as long as `labels`.
        x_label: what the bars are, with its unit.
        what: what is counted, for the axis and the table.

    Example:
        >>> histogram("Width", ["0", "1"], [Series("student", [1, 3])], x_label="width",
        ...           what="tokens").find("figcaption").text
        'Width'
    """
    labels, series = _trim(labels, series)
    top = _nice_ceiling(max((s.share(i) for s in series for i in range(len(labels))), default=0))
    svg = tag(
        "svg",
        *_histogram_y_axis(top, f"share of {what}"),
        *_histogram_bars(labels, series, top),
        *_histogram_x_axis(labels, x_label),
        viewBox=f"0 0 {HIST_WIDTH} {HIST_HEIGHT}",
        role="img",
        aria_label=f"{title}: bar chart; the values are in the table below",
    )
    return tag(
        "figure",
        tag("figcaption", title),
        _histogram_legend(series) if len(series) > 1 else tag("span"),
        svg,
        _histogram_values(labels, series, x_label, what),
        class_="card",
    )


def write_figure(figure: Element, output: Path, *, notes: Sequence[str] = ()) -> None:
    """Write a chart as an .svg file, or as an .html page with notes beneath it.

    Raises:
        ValueError: another ending.

    Example:
        >>> write_figure(bar_chart("t", ["a"], {"raw": [1.0]}), Path("figure.svg"))
    """
    if output.suffix == ".svg":
        text = ElementTree.tostring(figure, encoding="unicode") + "\n"
    elif output.suffix == ".html":
        lines = tag("pre", "\n".join(notes), class_="mono")
        text = render_page(figure.get("aria-label") or "figure", figure, lines)
    else:
        raise ValueError(f"--output {output}: name a file that ends in .svg or .html")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, "utf-8")


def _draw(
    line: Line, xs: Sequence[float], ys: Sequence[float], x_labels: Sequence[str]
) -> list[Element]:
    kind = f"s{line.colour}"
    if line.level:
        level = _line(xs[0], ys[-1], xs[-1], ys[-1], f"level {kind}")
        level.append(tag("title", f"{line.name}: {line.y[-1]:.4g}"))
        return [level]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    parts = [tag("polyline", points=points, class_=kind)]
    for x, y, value, label in zip(xs, ys, line.y, x_labels, strict=True):
        hint = tag("title", f"{line.name}, {label}: {value:.4g}")
        parts.append(tag("circle", hint, cx=f"{x:.1f}", cy=f"{y:.1f}", r="3.5", class_=kind))
    return parts


def _spread(places: Sequence[float]) -> list[float]:
    """Return the places of labels moved apart, so that none covers another."""
    order = sorted(range(len(places)), key=places.__getitem__)
    spread = list(places)
    for before, after in pairwise(order):
        spread[after] = max(spread[after], spread[before] + SLOT)
    overshoot = max(0.0, max(spread, default=0) - (LINE_HEIGHT - LINE_BOTTOM))
    return [place - overshoot for place in spread]


def _legend(names: Sequence[str], left: float, y: float) -> list[Element]:
    parts = []
    for n, name in enumerate(names):
        parts += [_box(left, y - 10, 11, 11, f"s{n}"), _text(name, left + 17, y)]
        left += 17 + 7.5 * len(name) + 22
    return parts


def _svg(parts: Sequence[Element], height: float, title: str) -> Element:
    return tag(
        "svg",
        tag("style", _STYLE),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height:g}",
        width=f"{WIDTH}",
        height=f"{height:g}",
        role="img",
        aria_label=title,
    )


def _text(text: str, x: float, y: float, **attributes: str) -> Element:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def _box(x: float, y: float, width: float, height: float, kind: str) -> Element:
    sizes = {"x": x, "y": y, "width": width, "height": height}
    return tag("rect", **{name: f"{size:.1f}" for name, size in sizes.items()}, class_=kind)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag("line", **{name: f"{end:.1f}" for name, end in ends.items()}, class_=kind)


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


def _bar_x(position: float, num_bars: int) -> float:
    return HIST_LEFT + position * (HIST_WIDTH - HIST_LEFT - HIST_RIGHT) / max(num_bars, 1)


def _share_y(share: float, top: float) -> float:
    return HIST_TOP + (1 - share / top) * (HIST_HEIGHT - HIST_TOP - HIST_BOTTOM)


def _histogram_y_axis(top: float, label: str) -> list[Element]:
    parts = []
    digits = max(0, 1 - math.floor(math.log10(100 * top))) if top < 0.1 else 0
    for tick in range(5):
        share = top * tick / 4
        y = f"{_share_y(share, top):.1f}"
        kind = "axis" if tick == 0 else "grid"
        parts.append(
            tag("line", x1=f"{HIST_LEFT}", x2=f"{HIST_WIDTH - HIST_RIGHT}", y1=y, y2=y, class_=kind)
        )
        text = f"{100 * share:.{digits}f} %"
        parts.append(tag("text", text, x=f"{HIST_LEFT - 6}", y=y, dy="0.35em", text_anchor="end"))
    middle = (HIST_TOP + HIST_HEIGHT - HIST_BOTTOM) / 2
    turn = f"rotate(-90 11 {middle:g})"
    parts.append(tag("text", label, x="11", y=f"{middle:g}", transform=turn, text_anchor="middle"))
    return parts


def _histogram_x_axis(labels: Sequence[str], label: str) -> list[Element]:
    every = max(1, math.ceil(len(labels) * max(map(len, labels), default=1) * 7.5 / 480))
    parts = [
        tag(
            "text",
            text,
            x=f"{_bar_x(i + 0.5, len(labels)):.1f}",
            y=f"{HIST_HEIGHT - HIST_BOTTOM + 16}",
            text_anchor="middle",
        )
        for i, text in enumerate(labels)
        if i % every == 0
    ]
    middle = (HIST_LEFT + HIST_WIDTH - HIST_RIGHT) / 2
    parts.append(tag("text", label, x=f"{middle:g}", y=f"{HIST_HEIGHT - 7}", text_anchor="middle"))
    return parts


def _histogram_bars(labels: Sequence[str], series: Sequence[Series], top: float) -> list[Element]:
    parts = []
    thick = 0.82 / len(series)
    for n, one in enumerate(series):
        for i, label in enumerate(labels):
            left = _bar_x(i + 0.09 + n * thick, len(labels))
            height = max(
                _share_y(0, top) - _share_y(one.share(i), top), 0.75 if one.counts[i] else 0
            )
            hint = "{} {}: {} ({})".format(one.name, label, *one.describe(i))
            parts.append(
                tag(
                    "rect",
                    tag("title", hint),
                    x=f"{left:.1f}",
                    y=f"{_share_y(0, top) - height:.2f}",
                    width=f"{_bar_x(i + 0.09 + (n + 1) * thick, len(labels)) - left - 0.4:.1f}",
                    height=f"{height:.2f}",
                    class_=one.name,
                )
            )
    return parts


def _histogram_legend(series: Sequence[Series]) -> Element:
    items = [tag("span", tag("i", class_=one.name), one.name) for one in series]
    return tag("div", *items, class_="legend")


def _histogram_values(
    labels: Sequence[str], series: Sequence[Series], x_label: str, what: str
) -> Element:
    heading = [x_label, *(part for one in series for part in (f"{one.name} {what}", "share"))]
    body = []
    for i, label in enumerate(labels):
        cells = [label]
        for one in series:
            cells += one.describe(i)
        body.append(_table_row(cells, "td"))
    table = tag("table", tag("thead", _table_row(heading, "th")), tag("tbody", *body))
    return tag("details", tag("summary", "values"), tag("div", table, class_="scroll"))


def _table_row(cells: Sequence[str], kind: str) -> Element:
    return tag("tr", *(tag(kind, cell, class_="number") for cell in cells))
