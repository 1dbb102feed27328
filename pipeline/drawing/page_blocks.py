"""Draw previews as a self-contained HTML page, joined as in the paper's Fig. 2.

Every block is an SVG that flows like a word. `textLength` forces tokens' widths, so connectors meet
them in any browser and font.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal
from xml.etree.ElementTree import Element

from wcwidth import width as display_width

from pipeline.drawing.blocks import Block, PreviewDocument, PreviewToken
from pipeline.drawing.formatting import format_count, public_name, short_names
from pipeline.drawing.web_page import Child, render_page, tag

_COLUMN, _PADDING, _GAP = 7.9, 5.0, 3.0
_CHIP_HEIGHT, _LINK_HEIGHT, _MARGIN = 24.0, 30.0, 1.0
_ARROW_HEIGHT, _ARROW_WIDTH = 7.0, 8.0
_HEIGHT = 2 * (_CHIP_HEIGHT + _MARGIN) + _LINK_HEIGHT

STYLE = """
.tokens { margin-top: .9rem; line-height: 0; }
.tokens svg { margin: 0 5px 14px 0; max-width: 100%; height: auto; vertical-align: top; }
.block text { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--ink); dominant-baseline: central; white-space: pre; }
.block rect { stroke-width: 1; }
.block line { stroke: var(--soft); stroke-width: 1.2; }
rect.student { fill: var(--student-tint); stroke: var(--student); }
rect.teacher { fill: var(--teacher-tint); stroke: var(--teacher); }
.block .kept { stroke-width: 1.6; }
.block line.kept { stroke: var(--student); }
polygon.kept { fill: var(--student); }
rect.dropped { fill: none; stroke: var(--line); }
.block text.dropped { fill: var(--soft); }
line.dropped { stroke-dasharray: 3 3; }
rect.unmapped { fill: none; stroke: var(--bad); stroke-dasharray: 4 3; }
.block text.unmapped { fill: var(--bad); }
.block line.unmapped { stroke: var(--bad); stroke-dasharray: 3 3; }
rect.template { fill: none; stroke: var(--soft); stroke-dasharray: 2 2; }
.block text.template { fill: var(--soft); }
rect.learned { stroke-width: 2.4; }
rect.kept.unmapped { fill: var(--student-tint); stroke-dasharray: none; }
.block g:hover rect { stroke-width: 2.6; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; align-items: center;
  margin-top: 1rem; }
.legend span { display: inline-flex; align-items: center; gap: .45rem; }
.legend svg { flex: none; }
article { padding: 1.1rem 1.25rem 1.3rem; margin-top: 1.1rem; }
article h2 { margin: 0; font-size: 1.05rem; overflow-wrap: anywhere; }
td { padding: .15rem 1.2rem .15rem 0; } td.number { text-align: right; }
"""
_LEGEND = (
    ("student", "student token"),
    ("teacher", "teacher token"),
    ("student unmapped", "unmapped"),
)
_CHAT_LEGEND = (
    ("student template", "of the chat template alone"),
    ("student learned", "learned"),
)
_NO_MARKS: Mapping[int, "Mark"] = MappingProxyType({})


@dataclass(frozen=True)
class Mark:
    """A student token's mark, with a hint for the pointer.

    `unmapped` is true if none of its teacher tokens has a loss.
    """

    kind: Literal["kept", "dropped"]
    hint: str
    unmapped: bool


@dataclass(frozen=True)
class _Place:
    left: float
    top: float
    size: float

    @property
    def centre(self) -> float:
        return self.left + self.size / 2

    @property
    def bottom(self) -> float:
        return self.top + _CHIP_HEIGHT


def render_preview(
    title: str,
    head: Sequence[Child],
    documents: Sequence[PreviewDocument],
    *,
    legend: Sequence[tuple[str, str]] = _LEGEND,
    marks: Mapping[int, Mark] = _NO_MARKS,
) -> str:
    """Return a self-contained page, without scripts or requests.

    `head` precedes the documents; `legend` explains classes of tokens, `marks` are by student
    token.
    """
    drawn = draw_documents(documents, legend=legend, marks=marks)
    return render_page(title, *head, *drawn, style=STYLE)


def name_sides(*sources: str) -> Iterator[Element]:
    """Yield the names of the student's tokenizer and the teacher's, in their colours."""
    full = [*map(public_name, sources)]
    for side, name, title in zip(("student", "teacher"), short_names(*full), full, strict=True):
        yield tag("span", name, class_=side, title=title)


def draw_documents(
    documents: Sequence[PreviewDocument],
    *,
    legend: Sequence[tuple[str, str]] = _LEGEND,
    marks: Mapping[int, Mark] = _NO_MARKS,
) -> list[Element]:
    """Return a legend and a card per document, for a page with `STYLE`."""
    tokens = (t for document in documents for block in document.blocks for t in block.student)
    if any(token.of_template for token in tokens):
        legend = (*legend, *_CHAT_LEGEND)
    return [_draw_legend(legend), *(_document(document, marks) for document in documents)]


def draw_block(block: Block, marks: Mapping[int, Mark] = _NO_MARKS) -> Element:
    """Return a block as an SVG, with student tokens joined to their spans.

    The links of a kept one end in an arrow.
    """
    width = max(_width(block.student), _width(block.teacher)) + 2 * _MARGIN
    student = _places(block.student, width, top=_MARGIN)
    teacher = _places(block.teacher, width, top=_MARGIN + _CHIP_HEIGHT + _LINK_HEIGHT)
    drawn = [
        _student_token(token, student, teacher, marks.get(token.index)) for token in block.student
    ]
    drawn += [
        tag("g", tag("title", _hint(token, "teacher")), *_chip(token, place, ["teacher"]))
        for token, place in zip(block.teacher, teacher.values(), strict=True)
    ]
    box = f"0 0 {_number(width)} {_number(_HEIGHT)}"
    return tag("svg", *drawn, **_numbers(width=width, height=_HEIGHT), viewBox=box, class_="block")


def _draw_legend(kinds: Sequence[tuple[str, str]]) -> Element:
    keys = [tag("span", _swatch(kind), words) for kind, words in kinds]
    signs = tag("span", "· ⏎ → space, newline, tab", tag("span", "∅ covers no byte"))
    return tag("div", *keys, signs, class_="legend soft small")


def _width(tokens: Sequence[PreviewToken]) -> float:
    return max(sum(_size(token) + _GAP for token in tokens) - _GAP, 0)


def _size(token: PreviewToken) -> float:
    return max(display_width(token.text), 1) * _COLUMN + 2 * _PADDING


def _places(tokens: Sequence[PreviewToken], width: float, *, top: float) -> dict[int, _Place]:
    places = {}
    left = (width - _width(tokens)) / 2
    for token in tokens:
        places[token.index] = _Place(left, top, _size(token))
        left += _size(token) + _GAP
    return places


def _student_token(
    token: PreviewToken,
    student: Mapping[int, _Place],
    teacher: Mapping[int, _Place],
    mark: Mark | None,
) -> Element:
    place = student[token.index]
    joined = [teacher[index] for index in range(*token.mapped)]
    if mark is None:
        links = _links(place, joined, "template" if token.of_template else "")
        kinds, hint = ["student"], _hint(token, "student")
    else:
        guided = mark.kind == "kept" and not mark.unmapped
        links = _links(place, joined, "kept" if guided else "dropped")
        kinds = ["student", mark.kind, *(["unmapped"] if mark.unmapped else [])]
        hint = mark.hint
    return tag("g", tag("title", hint), *links, *_chip(token, place, kinds))


def _links(place: _Place, teacher: Sequence[_Place], kind: str = "") -> list[Element]:
    x, top = place.centre, place.bottom
    if not teacher and kind == "template":
        return []
    if not teacher:
        return [_line(x, top, x, top + _LINK_HEIGHT / 3, "unmapped")]
    if kind != "kept":
        return [_line(x, top, other.centre, other.top, kind) for other in teacher]
    neck = top + _ARROW_HEIGHT
    corners = ((x, top), (x - _ARROW_WIDTH / 2, neck), (x + _ARROW_WIDTH / 2, neck))
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
    lines = [_line(x, neck, other.centre, other.top, kind) for other in teacher]
    return [*lines, tag("polygon", points=points, class_=kind)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    named = {"class_": kind} if kind else {}
    return tag("line", **_numbers(x1=x1, y1=y1, x2=x2, y2=y2), **named)


def _chip(token: PreviewToken, place: _Place, kinds: Sequence[str]) -> list[Element]:
    unmapped = token.mapped[0] == token.mapped[1] and "unmapped" not in kinds
    of_chat = ["template"] * token.of_template + ["learned"] * token.learned
    kind = " ".join(
        [*kinds, *(["unmapped"] if unmapped and not token.of_template else []), *of_chat]
    )
    box = _numbers(x=place.left, y=place.top, width=place.size, height=_CHIP_HEIGHT, rx=4)
    written = _numbers(
        x=place.left + _PADDING,
        y=place.top + _CHIP_HEIGHT / 2,
        textLength=place.size - 2 * _PADDING,
    )
    return [
        tag("rect", **box, class_=kind),
        tag("text", token.text, **written, lengthAdjust="spacingAndGlyphs", class_=kind),
    ]


def _hint(token: PreviewToken, side: str) -> str:
    start, end = token.byte_range
    other = "teacher" if side == "student" else "student"
    first, last = token.mapped
    mapped = f"{other} tokens {first}:{last}" if first < last else f"no {other} token"
    return f"{side} token {token.index}, id {token.token_id}, bytes {start}:{end}, {mapped}"


def _document(document: PreviewDocument, marks: Mapping[int, Mark]) -> Element:
    notes = []
    if not document.has_text:
        notes.append("The text was not kept, and the tokens, shown by their ids, do not spell it.")
    if rest := document.num_student_tokens - document.num_shown:
        notes.append(f"… {format_count(rest)} more student tokens.")
    return tag(
        "article",
        tag("h2", document.title),
        tag("p", document.facts, class_="soft small"),
        tag("div", *(draw_block(block, marks) for block in document.blocks), class_="tokens"),
        *(tag("p", note, class_="soft small") for note in notes),
        class_="card",
    )


def _swatch(kinds: str) -> Element:
    box = tag("rect", x="1", y="1", width="20", height="12", rx="3", class_=kinds)
    return tag("svg", box, width="22", height="14", viewBox="0 0 22 14")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _numbers(**values: float) -> dict[str, str]:
    return {name: _number(value) for name, value in values.items()}
