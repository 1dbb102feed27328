"""Draw previews in a terminal: student tokens above, teacher tokens below, block by block."""

from collections.abc import Iterator

import wcwidth

from pipeline.drawing.blocks import Block, PreviewDocument, PreviewToken
from pipeline.drawing.formatting import format_count, format_share, printable

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
    yield _paint(f'document "{printable(document.document_id)}"', "1", colour)
    facts = (
        f"{document.shard} {document.key}, {format_count(document.num_student_tokens)} student and "
        f"{format_count(document.num_teacher_tokens)} teacher tokens, "
        f"{format_count(document.num_unmapped)} unmapped "
        f"({format_share(document.num_unmapped, document.num_student_tokens)})"
    )
    yield _paint(printable(facts), _SOFT, colour)
    for line in _wrap(document.blocks, width - len(_LABELS[0])):
        cells = [_draw_block(block, colour) for block in line]
        tops, bottoms = zip(*cells, strict=True)
        yield (_paint(_LABELS[0], _STUDENT, colour) + _GAP.join(tops)).rstrip()
        yield (_paint(_LABELS[1], _TEACHER, colour) + _GAP.join(bottoms)).rstrip()
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


def _wrap(blocks: tuple[Block, ...], width: int) -> Iterator[list[Block]]:
    """Yield lines of blocks that fit; a block that is wider than a line has one of its own."""
    line: list[Block] = []
    used = 0
    for block in blocks:
        size = _block_width(block)
        if line and used + size > width:
            yield line
            line, used = [], 0
        line.append(block)
        used += size + len(_GAP)
    if line:
        yield line


def _block_width(block: Block) -> int:
    return max(_side_width(block.student), _side_width(block.teacher))


def _side_width(tokens: tuple[PreviewToken, ...]) -> int:
    marks = sum(_mark(token) != "" for token in tokens)
    return sum(display_width(token.text) for token in tokens) + max(len(tokens) - 1, 0) + marks


def _mark(token: PreviewToken) -> str:
    return "!" if token.mapped[0] == token.mapped[1] else ""


def _draw_block(block: Block, colour: bool) -> tuple[str, str]:
    width = _block_width(block)
    return (
        _draw_side(block.student, width, _STUDENT, colour),
        _draw_side(block.teacher, width, _TEACHER, colour),
    )


def _draw_side(tokens: tuple[PreviewToken, ...], width: int, side_colour: str, colour: bool) -> str:
    parts = []
    for token in tokens:
        code = _BYTES if token.is_bytes else side_colour
        mark = _mark(token)
        parts.append(_paint(token.text + mark, _UNMAPPED if mark else code, colour))
    separator = _paint(_SEPARATOR, _SOFT, colour)
    return separator.join(parts) + " " * (width - _side_width(tokens))


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour and text else text
