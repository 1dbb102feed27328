"""Draw previews in a terminal: student tokens above, teacher tokens below, block by block."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import wcwidth

from pipeline.drawing.blocks import Block, PreviewDocument, PreviewToken
from pipeline.drawing.formatting import format_count, printable

_STUDENT, _TEACHER, _UNMAPPED, _BYTES, _SOFT = "34", "33", "1;31", "35", "2"
_LABELS = ("student  ", "teacher  ")
_SEPARATOR = "|"
_GAP = "  "

LEGEND = (
    "blocks end where both tokenizations share a byte boundary; | divides tokens; ! is unmapped; "
    "· ⏎ → are space, newline, tab; ∅ covers no byte; <0xF0> is a byte"
)


def draw_document(document: PreviewDocument, *, width: int, colour: bool) -> Iterator[str]:
    """Yield the lines of one document.

    Args:
        document: what to draw.
        width: columns of the terminal.
        colour: whether to use ANSI colours.
    """
    yield _paint(printable(document.title), "1", colour)
    yield _paint(printable(document.facts), _SOFT, colour)
    drawn = [_draw_block(block, colour) for block in document.blocks]
    for line in _wrap(drawn, width - len(_LABELS[0])):
        for side, (label, code) in enumerate(zip(_LABELS, (_STUDENT, _TEACHER), strict=True)):
            yield (_paint(label, code, colour) + _GAP.join(b.sides[side] for b in line)).rstrip()
        yield ""
    if document.num_shown < document.num_student_tokens:
        rest = format_count(document.num_student_tokens - document.num_shown)
        yield _paint(f"… {rest} more student tokens (--max-tokens shows more)", _SOFT, colour)
        yield ""


def display_width(text: str) -> int:
    """Return the columns that text takes in a terminal: an emoji of several characters takes two.

    Example:
        >>> display_width("数a")
        3
    """
    return wcwidth.width(text)


class _Drawn(NamedTuple):
    """A block's two lines, equally wide."""

    sides: tuple[str, str]
    width: int


def _wrap(blocks: Iterable[_Drawn], width: int) -> Iterator[list[_Drawn]]:
    """Yield lines of blocks that fit; a block that is wider than a line has one of its own."""
    line: list[_Drawn] = []
    used = 0
    for block in blocks:
        if line and used + block.width > width:
            yield line
            line, used = [], 0
        line.append(block)
        used += block.width + len(_GAP)
    if line:
        yield line


def _draw_block(block: Block, colour: bool) -> _Drawn:
    top, over = _draw_side(block.student, _STUDENT, colour)
    bottom, under = _draw_side(block.teacher, _TEACHER, colour)
    width = max(over, under)
    return _Drawn((top + " " * (width - over), bottom + " " * (width - under)), width)


def _draw_side(tokens: tuple[PreviewToken, ...], side_colour: str, colour: bool) -> tuple[str, int]:
    """Return one side's tokens and how many columns they take."""
    parts, width = [], max(len(tokens) - 1, 0) * len(_SEPARATOR)
    for token in tokens:
        text, code = token.text, _BYTES if token.is_bytes else side_colour
        if token.mapped[0] == token.mapped[1]:
            text, code = f"{text}!", _UNMAPPED
        width += display_width(text)
        parts.append(_paint(text, code, colour))
    return _paint(_SEPARATOR, _SOFT, colour).join(parts), width


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour and text else text
