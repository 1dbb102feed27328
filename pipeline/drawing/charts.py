"""Charts by matplotlib, imported only to draw; in pages, ink takes the text's colour."""

import io
import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pipeline.command_line.failures import naming
from pipeline.drawing.formatting import format_share
from pipeline.drawing.web_page import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NOT_DRAWN: Final = (
    "Charts are drawn by matplotlib, which isn't installed: pip install -e '.[figures]' in the "
    "checkout."
)
"""A report's text in place of charts if matplotlib isn't installed."""

_INK: Final = "#1d2127"
_COLOURS: Final = ("#3b82d6", "#c9701f", "#2a9461", "#a860c2", "#7f8896")
"""Each with a contrast of at least 3 against white and against a dark page."""

_STYLE: Final[dict[Any, Any]] = {
    "figure.constrained_layout.use": True,
    "figure.titlesize": 14,
    "font.size": 12,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "text.color": _INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "vocag",  # the same chart, the same bytes
}
_ROW: Final = 0.24
"""Height of an interval, in inches."""
_WIDE = 11.2
"""Width of a chart that fills a page, in inches."""
_FEW, _AXIS_LETTERS = 5, 60
"""Bars that carry their values, and letters and gaps that fit under bars."""

Interval = tuple[float, float, float]


def line_chart(
    title: str,
    x: Sequence[float] | Sequence[str],
    lines: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float | None, float | None] = (None, None),
) -> "Figure":
    """Return lines over a common x axis, with a legend in the order of their ends.

    Lines have one value per x; strings are equally spaced. None in `y_range` follows the values.
    """
    from matplotlib.ticker import EngFormatter

    with _chart(title, 5.2) as (figure, axes):
        drawn = {
            name: axes.plot(x, values, "o-", color=_colour(n), markersize=4)[0]
            for n, (name, values) in enumerate(lines.items())
        }
        names = sorted(lines, key=lambda name: lines[name][-1], reverse=True)
        _legend(
            axes, {name: drawn[name] for name in names}, loc="center left", bbox_to_anchor=(1, 0.5)
        )
        axes.set(xlabel=clean(x_label), ylabel=clean(y_label), ylim=y_range)
        _round_ticks(axes.yaxis)
        if not any(isinstance(each, str) for each in x):
            whole = not any(float(each) % 1 for each in x)
            _round_ticks(axes.xaxis, 8, integer=whole)
            if whole:
                axes.xaxis.set_major_formatter(EngFormatter())
    return figure


def bar_chart(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    ticks: Collection[str] = (),
) -> "Figure":
    """Return upright bars of shares side by side; few bars carry their values.

    Each series has one share (0 to 1) per label. `ticks` are labels to write, as many as fit;
    empty: all.
    """
    with _chart(title, 3.8, width=6.8, margins=(1.0, 0.65, 0.1, 0.7)) as (figure, axes):
        thick = 0.82 / len(series)
        drawn = {}
        for n, (name, shares) in enumerate(series.items()):
            places = [bar + (n - (len(series) - 1) / 2) * thick for bar in range(len(labels))]
            drawn[name] = axes.bar(places, shares, thick, color=_colour(n))
            if len(labels) <= _FEW:
                told = ["" if isnan(each) else format_share(each, 1) for each in shares]
                axes.bar_label(drawn[name], told, fontsize=10)
        bars = [bar for bar, label in enumerate(labels) if not ticks or label in ticks]
        widest = max((len(labels[bar]) for bar in bars), default=1)
        written = bars[:: -(-len(bars) * (widest + 1) // _AXIS_LETTERS) or 1]
        axes.set_xticks(written, [clean(labels[bar]) for bar in written])
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.1)
        _round_ticks(axes.yaxis)
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
        axes.set(xlabel=clean(x_label), ylabel=clean(y_label))
        if len(series) > 1:
            _legend(axes, drawn, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return figure


def interval_chart(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Interval | None]],
    *,
    x_label: str,
    form: str = ".1f",
    marks: Sequence[float | None] = (),
) -> "Figure":
    """Return a point and its interval for each group and series.

    Each series has (low, value, high) or None per group; one without values is left out. `form`
    formats values, such as `+.3f`; `marks` are dashed levels in groups, such as chance.
    """
    colours = {name: _colour(n) for n, name in enumerate(series)}
    valued = {name: values for name, values in series.items() if any(values)}
    slot = 1 / (len(valued) + 0.8)
    with _chart(title, 1.5 + len(groups) * _ROW / slot, width=_WIDE) as (figure, axes):
        drawn = {}
        for n, (name, values) in enumerate(valued.items()):
            shift = (n - (len(valued) - 1) / 2) * slot
            known = [(group + shift, *ends) for group, ends in enumerate(values) if ends]
            points, ys = [point for *_, point, _ in known], [y for y, *_ in known]
            below = [point - low for _, low, point, _ in known]
            above = [high - point for *_, point, high in known]
            bars = axes.errorbar(points, ys, xerr=[below, above], fmt="o", color=colours[name])
            drawn[name] = bars
            for y, _, point, high in known:
                text, away = f"{point:{form}}", "offset points"
                axes.annotate(text, (high, y), (6, 0), textcoords=away, va="center")
        for group, mark in enumerate(marks):
            if mark is not None:
                axes.vlines(mark, group - 0.45, group + 0.45, _INK, "--")
        if axes.get_xlim()[0] <= 0 <= axes.get_xlim()[1]:
            axes.axvline(0, color=_INK, linewidth=1)
        _round_ticks(axes.xaxis)
        axes.set_yticks(range(len(groups)), [clean(group) for group in groups])
        axes.set(xlabel=clean(x_label), ylim=(len(groups) - 0.5, -0.5))  # the first is the highest
        axes.tick_params("y", length=0)
        axes.grid(visible=False, axis="y")
        _legend(axes, drawn, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return figure


def draw_svg(figure: "Figure") -> Element:
    """Return a chart as an element of a page, in its colours."""
    file = io.StringIO()
    _save(figure, file, "svg", transparent=True)
    root = ElementTree.fromstring(file.getvalue().replace(_INK, "currentColor"))
    for element in root.iter():
        # Inside a page SVG needs no namespaces; and an id there must not come twice.
        element.tag = element.tag.rpartition("}")[2]
        for name in [name for name in element.attrib if name.startswith("{")]:
            element.set(name.rpartition("}")[2], element.attrib.pop(name))
        if element.tag == "g":
            element.attrib.pop("id", None)
    root.remove(next(root.iter("metadata")))
    title = figure.get_suptitle().replace("\n", " ")
    root.attrib |= {"role": "img", "aria-label": title, "style": "max-width: 100%; height: auto"}
    return root


def write_figure(figure: "Figure", output: Path) -> None:
    """Write a chart as .svg, .pdf or .png; errors as in `require_drawable`."""
    require_drawable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with naming(str(output)):
        _save(figure, output, output.suffix[1:])


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require_drawable(output: Path | None) -> None:
    """Raise ValueError unless a file ends in .svg, .pdf or .png and matplotlib is installed."""
    if output is None:
        return
    if output.suffix not in (".svg", ".pdf", ".png"):
        raise ValueError(f"{output}: name a file that ends in .svg, .pdf or .png")
    if not can_draw():
        raise ValueError(f"{output} can't be written. {NOT_DRAWN}")


@contextmanager
def _chart(
    title: str,
    height: float,
    *,
    width: float = 9,
    margins: tuple[float, float, float, float] | None = None,
) -> "Iterator[tuple[Figure, Axes]]":
    """Yield a new figure of a size in inches.

    Finding margins takes as long as drawing: a page's bars, which align jobs draw, have fixed ones
    (left, bottom, right, top below a title of one line).
    """
    import matplotlib
    from matplotlib.figure import Figure

    finds_margins = {"figure.constrained_layout.use": margins is None}
    with matplotlib.rc_context(_STYLE | finds_margins):
        figure = Figure(figsize=(width, height))
        lines = textwrap.fill(clean(title), int(8 * width))  # some 8 letters an inch
        figure.suptitle(lines, x=0.01, ha="left", weight="bold")
        if margins:
            left, bottom, right, top = margins
            top += 0.24 * lines.count("\n")
            figure.subplots_adjust(
                left / width, bottom / height, 1 - right / width, 1 - top / height
            )
        yield figure, figure.subplots()


def _legend(axes: "Axes", drawn: Mapping[str, Any], **place: Any) -> None:
    # With their names, because matplotlib leaves out a label that starts with an underscore.
    names = [clean(name) for name in drawn]
    axes.legend(list(drawn.values()), names, **place)


def _round_ticks(axis: "Axis", num: int | None = None, *, integer: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(num or "auto", integer=integer, steps=[1, 2, 5, 10]))


def _save(figure: "Figure", file: Path | IO[str], kind: str, **options: Any) -> None:
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The reader's fonts draw the text, not the font that has been used to measure it.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        metadata = {"Date": None} if kind == "svg" else None  # the same chart, the same bytes
        figure.savefig(file, format=kind, metadata=metadata, **options)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
