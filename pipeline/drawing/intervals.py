"""Values with their intervals, side by side, as SVG: do these two differ at all?"""

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from pipeline.drawing.charts import BAR_LEFT, WIDTH, _legend, _line, _svg, _text
from pipeline.drawing.web_page import tag

_COLOURS = 5
_SLOT, _GAP, _TOP, _RIGHT, _TICKS = 16, 14, 64, 120, 5

Interval = tuple[float, float, float]


def interval_chart(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Interval | None]],
    *,
    unit: str = "",
    marks: Sequence[float | None] = (),
    digits: int = 1,
) -> Element:
    """Return a point and a bar of its interval for each group and series.

    Args:
        title: what is shown.
        groups: the groups' labels.
        series: by name, (low, value, high) for each group; None where there is none.
        unit: after the values.
        marks: a dashed level in each group, such as chance.
        digits: of the values, after the point.

    Example:
        >>> interval_chart("accuracy", ["GSM8K"], {"full": [(1.0, 2.0, 3.5)]}, unit=" %").tag
        'svg'
    """
    ends = [value for values in series.values() for value in values if value is not None]
    levels = [mark for mark in marks if mark is not None]
    largest = max([high for _, _, high in ends] + levels, default=1.0) or 1.0
    scale = (WIDTH - BAR_LEFT - _RIGHT) / largest
    group_height = len(series) * _SLOT + _GAP
    bottom = _TOP + len(groups) * group_height
    parts = [_text(title, 14, 26, class_="title"), *_legend(list(series), 14, 48)]
    for tick in range(_TICKS + 1):
        x = BAR_LEFT + tick / _TICKS * largest * scale
        parts.append(_line(x, _TOP - 6, x, bottom, "grid" if tick else "axis"))
        label = f"{tick / _TICKS * largest:.3g}{unit}"
        parts.append(_text(label, x, bottom + 16, text_anchor="middle", class_="soft"))
    for g, group in enumerate(groups):
        y = _TOP + g * group_height
        middle = y + len(series) * _SLOT / 2
        parts.append(_text(group, BAR_LEFT - 10, middle, text_anchor="end", dy="0.35em"))
        if marks and (mark := marks[g]) is not None:
            x = BAR_LEFT + mark * scale
            parts.append(_line(x, y, x, y + len(series) * _SLOT, "level s4"))
        for s, (name, values) in enumerate(series.items()):
            if (value := values[g]) is not None:
                text = f"{value[1]:.{digits}f}{unit}"
                parts += _point(f"{group}, {name}", value, text, y + (s + 0.5) * _SLOT, scale, s)
    return _svg(parts, bottom + 28, title)


def _point(
    what: str, interval: Interval, text: str, y: float, scale: float, number: int
) -> list[Element]:
    low, value, high = (BAR_LEFT + end * scale for end in interval)
    kind = f"s{number % _COLOURS}"
    hint = tag("title", f"{what}: {text}, 95 % from {interval[0]:.3g} to {interval[2]:.3g}")
    points = f"{low:.1f},{y:.1f} {high:.1f},{y:.1f}"
    return [
        tag("polyline", points=points, class_=kind),
        tag("circle", hint, cx=f"{value:.1f}", cy=f"{y:.1f}", r="4", class_=kind),
        _text(text, high + 8, y, dy="0.35em"),
    ]
