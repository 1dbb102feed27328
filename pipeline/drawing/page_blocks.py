"""Draw previews as a self-contained HTML page, joined as in the paper's Fig. 2.

Every block is one small SVG, so that connectors meet their tokens in any browser and font: token
widths are counted in columns of a monospace font and forced with `textLength`. Blocks flow like
words, so a page of any width will do.
"""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from pipeline.drawing.blocks import Block, PreviewDocument, PreviewToken
from pipeline.drawing.formatting import format_count, format_share
from pipeline.drawing.terminal_blocks import display_width
from pipeline.drawing.web_page import render_page, tag
from schemas.manifest import Manifest

COLUMN, PADDING, GAP = 7.9, 5.0, 3.0
CHIP_HEIGHT, LINK_HEIGHT, MARGIN = 24.0, 30.0, 1.0
HEIGHT = 2 * (CHIP_HEIGHT + MARGIN) + LINK_HEIGHT

_STYLE = """
article { padding: 1.1rem 1.25rem 1.3rem; margin-top: 1.1rem; }
article h2 { margin: 0; font-size: 1.05rem; overflow-wrap: anywhere; }
.tokens { margin-top: .9rem; line-height: 0; }
.tokens svg { margin: 0 5px 14px 0; max-width: 100%; height: auto; vertical-align: top; }
.tokens hr { border: 0; margin: 0; height: 0; }
svg text { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--ink); dominant-baseline: central; white-space: pre; }
svg rect { stroke-width: 1; }
rect.student { fill: var(--student-tint); stroke: var(--student); }
rect.teacher { fill: var(--teacher-tint); stroke: var(--teacher); }
rect.bytes { stroke-dasharray: 1.5 2; }
rect.unmapped { fill: none; stroke: var(--bad); stroke-dasharray: 4 3; }
text.unmapped { fill: var(--bad); }
line { stroke: var(--soft); stroke-width: 1.2; }
line.unmapped { stroke: var(--bad); stroke-dasharray: 3 3; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; align-items: center;
  margin-top: 1rem; }
.legend span { display: inline-flex; align-items: center; gap: .45rem; }
.legend svg { flex: none; }
"""


def render_preview(manifest: Manifest, documents: Sequence[PreviewDocument]) -> str:
    """Return the page: self-contained HTML without scripts or requests.

    Example:
        >>> Path("preview.html").write_text(render_preview(manifest, documents), "utf-8")
    """
    student = tag("span", manifest.student.source, class_="student")
    teacher = tag("span", manifest.teacher.source, class_="teacher")
    return render_page(
        f"{manifest.name}: preview",
        tag("h1", f"{manifest.name}, aligned"),
        tag("p", "Student ", student, " above, teacher ", teacher, " below."),
        tag("p", "Fingerprint ", tag("code", manifest.fingerprint), class_="soft small"),
        _legend(),
        *(_document(document) for document in documents),
        style=_STYLE,
    )


def draw_block(block: Block) -> Element:
    """Return a block as an SVG, each student token joined to every teacher token of its span."""
    student, student_width = _places(block.student)
    teacher, teacher_width = _places(block.teacher)
    width = max(student_width, teacher_width) + 2 * MARGIN
    student = [(left + (width - student_width) / 2, size) for left, size in student]
    teacher = [(left + (width - teacher_width) / 2, size) for left, size in teacher]
    return tag(
        "svg",
        *_links(block, student, teacher),
        *_chips(block.student, student, "student", MARGIN),
        *_chips(block.teacher, teacher, "teacher", MARGIN + CHIP_HEIGHT + LINK_HEIGHT),
        width=_number(width),
        height=_number(HEIGHT),
        viewBox=f"0 0 {_number(width)} {_number(HEIGHT)}",
    )


def _places(tokens: Sequence[PreviewToken]) -> tuple[list[tuple[float, float]], float]:
    """Return (left, width) of each token's chip, and the width of them all."""
    places = []
    left = 0.0
    for token in tokens:
        size = max(display_width(token.text), 1) * COLUMN + 2 * PADDING
        places.append((left, size))
        left += size + GAP
    return places, max(left - GAP, 0)


def _links(
    block: Block, student: list[tuple[float, float]], teacher: list[tuple[float, float]]
) -> list[Element]:
    top, bottom = MARGIN + CHIP_HEIGHT, MARGIN + CHIP_HEIGHT + LINK_HEIGHT
    first = block.teacher[0].index if block.teacher else 0
    lines = []
    for token, (left, size) in zip(block.student, student, strict=True):
        x = left + size / 2
        for index in range(*token.mapped):
            other_left, other_size = teacher[index - first]
            lines.append(_line(x, top, other_left + other_size / 2, bottom))
        if token.mapped[0] == token.mapped[1]:
            lines.append(_line(x, top, x, top + LINK_HEIGHT / 3, class_="unmapped"))
    return lines


def _line(x1: float, y1: float, x2: float, y2: float, **attributes: str) -> Element:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag("line", **{name: _number(value) for name, value in ends.items()}, **attributes)


def _chips(
    tokens: Sequence[PreviewToken], places: list[tuple[float, float]], side: str, top: float
) -> list[Element]:
    return [
        _chip(token, left, size, side, top)
        for token, (left, size) in zip(tokens, places, strict=True)
    ]


def _chip(token: PreviewToken, left: float, size: float, side: str, top: float) -> Element:
    unmapped = token.mapped[0] == token.mapped[1]
    kinds = [side, *(["bytes"] if token.is_bytes else []), *(["unmapped"] if unmapped else [])]
    box = tag(
        "rect",
        x=_number(left),
        y=_number(top),
        width=_number(size),
        height=_number(CHIP_HEIGHT),
        rx="4",
        class_=" ".join(kinds),
    )
    text = tag(
        "text",
        token.text,
        x=_number(left + PADDING),
        y=_number(top + CHIP_HEIGHT / 2),
        textLength=_number(size - 2 * PADDING),
        lengthAdjust="spacingAndGlyphs",
        class_="unmapped" if unmapped else "mapped",
    )
    return tag("g", tag("title", _hint(token, side)), box, text)


def _hint(token: PreviewToken, side: str) -> str:
    start, end = token.byte_range
    other = "teacher" if side == "student" else "student"
    first, last = token.mapped
    mapped = f"{other} tokens {first}:{last}" if first < last else f"no {other} token"
    return f"{side} token {token.index}, id {token.token_id}, bytes {start}:{end}, {mapped}"


def _document(document: PreviewDocument) -> Element:
    contents: list[Element] = []
    for block in document.blocks:
        contents.append(draw_block(block))
        if any("⏎" in token.text for token in block.student):
            contents.append(tag("hr"))
    facts = (
        f"{format_count(document.num_student_tokens)} student tokens, "
        f"{format_count(document.num_teacher_tokens)} teacher tokens, "
        f"{format_count(document.num_unmapped)} unmapped "
        f"({format_share(document.num_unmapped, document.num_student_tokens)}), "
        f"{format_count(document.num_text_bytes)} bytes; sample {document.key} in {document.shard}"
    )
    origin = "the kept text" if document.has_text else "the vocabularies: the text was not kept"
    rest = document.num_student_tokens - document.num_shown
    notes = [tag("p", f"Token texts come from {origin}.", class_="soft small")]
    if rest:
        notes.append(tag("p", f"… {format_count(rest)} more student tokens.", class_="soft small"))
    return tag(
        "article",
        tag("h2", document.document_id),
        tag("p", facts, class_="soft small"),
        tag("div", *contents, class_="tokens"),
        *notes,
        class_="card",
    )


def _legend() -> Element:
    items = (
        ("student", "student token"),
        ("teacher", "teacher token"),
        ("student bytes", "bytes of a character"),
        ("student unmapped", "unmapped"),
    )
    keys = [tag("span", _swatch(kinds), words) for kinds, words in items]
    signs = tag("span", "· ⏎ → space, newline, tab", tag("span", "∅ covers no byte"))
    return tag("div", *keys, signs, class_="legend soft small")


def _swatch(kinds: str) -> Element:
    box = tag("rect", x="1", y="1", width="20", height="12", rx="3", class_=kinds)
    return tag("svg", box, width="22", height="14", viewBox="0 0 22 14")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
