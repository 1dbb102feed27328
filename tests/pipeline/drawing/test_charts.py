"""Charts say what they were given: the values are found again in their lines, bars and points."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from pipeline.drawing.charts import bar_chart, draw_svg, interval_chart, line_chart, write_figure

HOSTILE = "</svg><script>\x00\ud800 $x_1$"


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def runs() -> Figure:
    values = {"_low": [3.0, 1.0], "high": [3.0, 2.0]}
    return line_chart("Loss", [10, 20], values, x_label="step", y_label="bits", y_range=(0, None))


def test_lines_hold_their_values_and_are_named_from_the_top() -> None:
    axes = runs().axes[0]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[3, 1], [3, 2]]
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[10, 20]] * 2
    assert legend(runs()) == ["high", "_low"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_ylim()[0]) == ("step", "bits", 0)


@pytest.mark.parametrize("num_bars", [2, 40])
def test_bars_are_as_high_as_their_shares(num_bars: int) -> None:
    labels, shares = [str(n) for n in range(num_bars)], [n / 100 for n in range(num_bars)]
    series = {"student": shares, "teacher": shares[::-1]}
    figure = bar_chart("Width", labels, series, x_label="width", y_label="share of tokens")
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [*shares, *shares[::-1]]
    assert {text.get_text() for text in axes.texts} == (
        {"0 %", "1.00 %"} if num_bars == 2 else set()
    )
    assert legend(figure) == ["student", "teacher"]
    shown = [text.get_text() for text in axes.get_xticklabels()]
    assert shown == labels[:: 1 if num_bars == 2 else 2]


def test_a_share_that_is_almost_none_says_so() -> None:
    figure = bar_chart("W", ["0", "1", "2"], {"a": [0, 2e-7, 0.02]}, x_label="w", y_label="share")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0 %", "< 0.001 %", "2.00 %"]


def test_intervals_hold_their_ends() -> None:
    series = {"full": [(1.0, 2.0, 3.5), None], "none": [None, None]}
    figure = interval_chart("A", ["one", "two"], series, x_label="%", marks=[None, 25.0])
    axes = figure.axes[0]
    point = axes.containers[0][0]
    assert list(point.get_xdata()) == [2.0]
    assert [text.get_text() for text in axes.texts] == ["2.0"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first group is the highest"
    drawn = [segment for lines in axes.collections for segment in lines.get_segments()]
    assert [list(segment[:, 0]) for segment in drawn] == [[1.0, 3.5], [25.0, 25.0]]


def test_ticks_are_round_and_only_students_with_values_are_named() -> None:
    series = {"none": [None], "one": [(0.6, 0.75, 0.9)]}
    figures = [
        (interval_chart("A", ["set"], series, x_label="%"), "xaxis"),
        (line_chart("A", [0.5, 7.0], {"a": [0.1, 0.85]}, x_label="x", y_label="y"), "yaxis"),
    ]
    for figure, axis in figures:
        places = getattr(figure.axes[0], axis).get_majorticklocs()
        step = f"{places[1] - places[0]:.1e}"
        assert len(places) > 2
        assert step[:3] in ("1.0", "2.0", "5.0")
    chart = figures[0][0]
    assert legend(chart) == ["one"]
    assert chart.axes[0].get_xlim()[0] > 0, "the values have the width"
    lengths = bar_chart("A", list("123456"), {"a": [0.1] * 6}, x_label="x", y_label="y", ticks="24")
    assert [text.get_text() for text in lengths.axes[0].get_xticklabels()] == ["2", "4"]


def test_the_same_chart_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        write_figure(runs(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    root = ElementTree.parse(paths[0]).getroot()
    assert {"high", "_low"} <= {element.text for element in root.iter() if element.text}


def test_any_text_is_drawn_as_text(recwarn: pytest.WarningsRecorder) -> None:
    name = HOSTILE + " 学生"
    chart = line_chart(name, ["1"], {name: [1.0]}, x_label=name, y_label=name)
    drawn = draw_svg(chart)
    shown = "</svg><script>␀? $x_1$ 学生"
    assert [text.text for text in drawn.iter("text")].count(shown) == 4
    assert drawn.get("aria-label") == shown
    assert not recwarn
