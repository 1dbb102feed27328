"""Draw previews in a terminal, student tokens above, teacher tokens below."""

from collections.abc import Iterable, Iterator

from wcwidth import width as display_width  # an emoji of several characters has two columns

from pipeline.command_line.failures import printable
from pipeline.drawing.blocks import Block, PreviewDocument, PreviewToken
from pipeline.drawing.formatting import format_count

_LABELS = ("student  ", "teacher  ")
_SEPARATOR = "|"
_GAP = "  "

LEGEND = (
    "blocks end where both tokenizations share a byte boundary; | divides tokens; ! is unmapped; "
    "· ⏎ → are space, newline, tab; ∅ covers no byte; <0xF0> is a byte"
)
CHAT_LEGEND = "⟨ ⟩ is the chat template's; ✓ is learned"


def draw_document(document: PreviewDocument, *, width: int) -> Iterator[str]:
    """Yield a document's lines for a terminal with `width` columns."""
    yield printable(document.title)
    yield printable(document.facts)
    if any(token.of_template for block in document.blocks for token in block.student):
        yield CHAT_LEGEND
    for line in _wrap(map(_draw_block, document.blocks), width - len(_LABELS[0])):
        for label, side in zip(_LABELS, zip(*line, strict=True), strict=True):
            yield (label + _GAP.join(side)).rstrip()
        yield ""
    if document.num_shown < document.num_student_tokens:
        rest = format_count(document.num_student_tokens - document.num_shown)
        yield f"… {rest} more student tokens (--max-tokens shows more)"
        yield ""


_Drawn = tuple[str, str]
"""A block's two lines, equally wide."""


def _wrap(blocks: Iterable[_Drawn], width: int) -> Iterator[list[_Drawn]]:
    line: list[_Drawn] = []
    used = 0
    for block in blocks:
        own = display_width(block[0])
        if line and used + own > width:
            yield line
            line, used = [], 0
        line.append(block)
        used += own + len(_GAP)
    if line:
        yield line


def _draw_block(block: Block) -> _Drawn:
    top, bottom = (
        _SEPARATOR.join(map(_draw_token, side)) for side in (block.student, block.teacher)
    )
    over, under = display_width(top), display_width(bottom)
    width = max(over, under)
    return top + " " * (width - over), bottom + " " * (width - under)


def _draw_token(token: PreviewToken) -> str:
    if token.of_template:
        return f"⟨{token.text}⟩{'✓' if token.learned else ''}"
    text = f"{token.text}{'✓' if token.learned else ''}"
    return text if token.mapped[0] < token.mapped[1] else f"{text}!"
