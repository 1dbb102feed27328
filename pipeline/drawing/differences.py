"""Differences with their errors around zero, side by side, as SVG."""

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from pipeline.drawing.charts import BAR_LEFT, WIDTH, _legend, _line, _svg, _text
from pipeline.drawing.web_page import tag

_COLOURS = 5
_SLOT, _GAP, _TOP, _RIGHT, _TICKS = 16, 12, 64, 110, 4


def difference_chart(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float] | None]],
    *,
    x_label: str,
    digits: int = 3,
) -> Element:
    """Return a point and its error bar for each group and series, left or right of zero.

    Args:
        title: what is shown.
        groups: the groups' labels.
        series: by name, (difference, error) for each group; None where there is none.
        x_label: what differs from what, with its unit.
        digits: of the differences, after the point.

    Example:
        >>> difference_chart("gain", ["teacher"], {"after": [(-0.02, 0.01)]}, x_label="bits").tag
        'svg'
    """
    known = [value for values in series.values() for value in values if value is not None]
    low = min([0.0, *(value - error for value, error in known)])
    high = max([0.0, *(value + error for value, error in known)])
    width = (high - low) or 1.0
    group_height = len(series) * _SLOT + _GAP
    bottom = _TOP + len(groups) * group_height

    def x_of(value: float) -> float:
        return BAR_LEFT + (value - low) / width * (WIDTH - BAR_LEFT - _RIGHT)

    parts = [_text(title, 14, 26, class_="title"), *_legend(list(series), 14, 48)]
    for tick in range(_TICKS + 1):
        value = low + tick / _TICKS * width
        parts.append(_line(x_of(value), _TOP - 6, x_of(value), bottom, "grid"))
        label = f"{value:+.{digits}f}"
        parts.append(_text(label, x_of(value), bottom + 16, text_anchor="middle", class_="soft"))
    parts.append(_line(x_of(0.0), _TOP - 6, x_of(0.0), bottom, "axis"))
    middle = (BAR_LEFT + WIDTH - _RIGHT) / 2
    parts.append(_text(x_label, middle, bottom + 36, text_anchor="middle", class_="soft"))
    for g, group in enumerate(groups):
        top = _TOP + g * group_height
        y = top + len(series) * _SLOT / 2
        parts.append(_text(group, BAR_LEFT - 10, y, text_anchor="end", dy="0.35em"))
        for s, (name, values) in enumerate(series.items()):
            if (own := values[g]) is not None:
                ends = [x_of(own[0] - own[1]), x_of(own[0]), x_of(own[0] + own[1])]
                text = f"{own[0]:+.{digits}f}"
                hint = f"{group}, {name}: {text} ± {own[1]:.{digits}f}"
                parts += _point(ends, text, hint, top + (s + 0.5) * _SLOT, f"s{s % _COLOURS}")
    return _svg(parts, bottom + 48, title)


def _point(ends: Sequence[float], text: str, hint: str, y: float, kind: str) -> list[Element]:
    points = f"{ends[0]:.1f},{y:.1f} {ends[2]:.1f},{y:.1f}"
    return [
        tag("polyline", points=points, class_=kind),
        tag("circle", tag("title", hint), cx=f"{ends[1]:.1f}", cy=f"{y:.1f}", r="4", class_=kind),
        _text(text, ends[2] + 8, y, dy="0.35em"),
    ]
