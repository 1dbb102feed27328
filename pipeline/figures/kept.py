"""Which tokens of a text a real teacher keeps for a real student (paper, Fig. 8)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from typing import cast
from xml.etree.ElementTree import Element

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.alignment import align_batch
from pipeline.batches import Ranges, SourceDocument
from pipeline.dataset.conventions import name_tokens
from pipeline.drawing.blocks import find_blocks, show_bytes
from pipeline.drawing.formatting import format_count, format_share, format_table
from pipeline.drawing.terminal_blocks import display_width
from pipeline.drawing.web_page import render_page, tag
from pipeline.guidance import Aggregation, SelectionRule, aggregate_teacher_losses, select_tokens
from pipeline.guidance.cross_entropy import score_tokens
from pipeline.scoring.hf_models import hidden_states, load_language_model, output_weight
from pipeline.tokenization import Tokenizer

COLUMN, PADDING, GAP = 7.9, 5.0, 4.0
CHIP, LINK, MARGIN = 24.0, 34.0, 1.0
NUM_SHOWN = 12

_STYLE = """
.tokens { margin-top: 1.2rem; line-height: 0; }
.tokens svg { margin: 0 5px 16px 0; max-width: 100%; height: auto; vertical-align: top; }
svg text { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--ink); dominant-baseline: central; white-space: pre; }
rect.kept { fill: var(--student-tint); stroke: var(--student); stroke-width: 1.6; }
rect.dropped { fill: none; stroke: var(--line); }
text.dropped { fill: var(--soft); }
rect.unmapped { stroke: var(--bad); }
rect.teacher { fill: var(--teacher-tint); stroke: var(--teacher); }
line.kept { stroke: var(--student); stroke-width: 1.6; }
line.dropped { stroke: var(--soft); stroke-dasharray: 3 3; }
.head { fill: var(--student); }
g:hover rect { stroke-width: 2.6; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin-top: 1rem; }
"""


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """A text's student tokens with what decided about each.

    Attributes:
        student_pieces: the student tokens' texts, made visible.
        teacher_pieces: the teacher tokens'.
        teacher_spans: int64 [T_student, 2].
        student_losses: float64 [T_student], nats; NaN where a token has no context.
        guidance: float64 [T_student], nats, the teacher's; NaN = unmapped.
        kept: bool [T_student].
        threshold: the smallest kept difference, nats; NaN where none was kept.
    """

    student_pieces: list[str]
    teacher_pieces: list[str]
    teacher_spans: Ranges
    student_losses: NDArray[np.float64]
    guidance: NDArray[np.float64]
    kept: NDArray[np.bool_]
    threshold: float


def score_text(
    text: str,
    *,
    student: tuple[str, Tokenizer],
    teacher: tuple[str, Tokenizer],
    keep_fraction: float = 0.4,
    aggregation: str = "max",
    student_bos: str | None = None,
    teacher_context: str | None = None,
) -> KeptTokens:
    """Score a text with both models and choose the tokens that count.

    Args:
        text: at most as long as the models' context.
        student: its model (folder, repository or .gguf file) and its tokenizer.
        teacher: likewise.
        keep_fraction: share of the mapped tokens to keep.
        aggregation: Φ.
        student_bos: stands before the student's text: a token, its id, or "none"; None: what its
            tokenizer says, see `TokenizerRecord.around_text`.
        teacher_context: stands before the teacher's text, likewise.

    Raises:
        ValueError: an unknown token, an empty text, one that can't be tokenized, or is longer than
            a context.

    Example:
        >>> score_text("1 + 1 = 2", student=student, teacher=teacher).kept.sum()

    Source: Eq. 2 and 4.
    """
    data = text.encode("utf-8", "surrogatepass")
    batch = align_batch([SourceDocument("text", data)], student[1], teacher[1])
    for _, reason in batch.failures:
        raise ValueError(f"the text can't be aligned: {reason}")
    if not len(batch.student.input_ids):
        raise ValueError("the text is empty")
    student_losses, student_mask = _score(*student, batch.student.input_ids, student_bos)
    teacher_losses, teacher_mask = _score(*teacher, batch.teacher.input_ids, teacher_context)
    guidance = aggregate_teacher_losses(
        teacher_losses,
        torch.from_numpy(batch.teacher_spans)[None],
        cast(Aggregation, aggregation),
        teacher_loss_mask=teacher_mask,
    )
    selection = select_tokens(
        student_losses,
        guidance,
        loss_mask=student_mask,
        rule=SelectionRule(keep_fraction=keep_fraction),
    )
    return KeptTokens(
        student_pieces=_pieces(data, batch.student.byte_offsets),
        teacher_pieces=_pieces(data, batch.teacher.byte_offsets),
        teacher_spans=batch.teacher_spans,
        student_losses=student_losses[0].double().numpy(),
        guidance=guidance[0].double().numpy(),
        kept=selection.kept[0].numpy(),
        threshold=float(selection.threshold[0]),
    )


def describe_kept(tokens: KeptTokens) -> Iterator[str]:
    """Yield the summary and the tokens with the largest differences for the terminal."""
    yield _summary(tokens)
    differences = tokens.student_losses - tokens.guidance
    largest = np.argsort(np.where(np.isnan(differences), -np.inf, differences))[::-1][:NUM_SHOWN]
    rows = [["token", "text", "student", "teacher", "difference", ""]]
    for i in largest.tolist():
        losses = (tokens.student_losses[i], tokens.guidance[i], differences[i])
        kept = "kept" if tokens.kept[i] else "dropped"
        rows.append([str(i), tokens.student_pieces[i], *(f"{x:.2f}" for x in losses), kept])
    yield from format_table(rows, align="><>>><")


def draw_kept(tokens: KeptTokens, student: str, teacher: str) -> str:
    """Return a self-contained page: student tokens above, teacher tokens below."""
    blocks = [
        _draw_block(tokens, slice(*s), slice(*t))
        for s, t in find_blocks(tokens.teacher_spans, len(tokens.teacher_pieces))
    ]
    names = (tag("span", student, class_="student"), tag("span", teacher, class_="teacher"))
    legend = [
        tag("span", "solid, with an arrow: kept, the teacher guides this token"),
        tag("span", "dashed: dropped"),
        tag("span", "red frame: unmapped"),
        tag("span", "· ⏎ → are space, newline, tab; hover for losses in nats"),
    ]
    return render_page(
        "Which tokens the teacher keeps",
        tag("h1", "Which tokens the teacher keeps"),
        tag("p", "Student ", names[0], " above, teacher ", names[1], " below."),
        tag("p", _summary(tokens)),
        tag("div", *legend, class_="legend soft small"),
        tag("div", *blocks, class_="tokens"),
        style=_STYLE,
    )


@torch.inference_mode()
def _score(
    source: str, tokenizer: Tokenizer, ids: NDArray[np.uint32], before: str | None
) -> tuple[Tensor, Tensor]:
    """Return a model's losses of a text's tokens and where it has any, [1, T] each."""
    model = load_language_model(source, packed=False)
    around = name_tokens(tokenizer.around_text, lambda: tokenizer, before=before)
    context = around.first_token_id
    tokens = [*([] if context is None else [context]), *ids.tolist()]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(tokens) > limit:
        raise ValueError(f"the text has {len(tokens)} tokens, {source} can see {limit}: shorten it")
    input_ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    hidden = hidden_states(model, input_ids, position_ids=positions)
    mask = positions > 0
    losses = score_tokens(hidden, output_weight(model), input_ids, teacher_loss_mask=mask)
    num_added = len(tokens) - len(ids)
    return losses[:, num_added:], mask[:, num_added:]


def _pieces(text: bytes, byte_offsets: Ranges) -> list[str]:
    return [show_bytes(text[start:end]) or "∅" for start, end in byte_offsets.tolist()]


def _summary(tokens: KeptTokens) -> str:
    num_tokens, num_kept = len(tokens.kept), int(tokens.kept.sum())
    mapped = ~np.isnan(tokens.guidance)
    return (
        f"{format_count(num_tokens)} student tokens, {format_share(int(mapped.sum()), num_tokens)} "
        f"mapped, {format_share(num_kept, num_tokens)} kept (threshold {tokens.threshold:.2f} "
        f"nats); mean loss: student {np.nanmean(tokens.student_losses):.2f}, teacher over mapped "
        f"tokens {tokens.guidance[mapped].mean():.2f} nats"
    )


def _draw_block(tokens: KeptTokens, student: slice, teacher: slice) -> Element:
    above, width_above = _places(tokens.student_pieces[student])
    below, width_below = _places(tokens.teacher_pieces[teacher])
    width = max(width_above, width_below) + 2 * MARGIN
    above = [(left + (width - width_above) / 2, size) for left, size in above]
    below = [(left + (width - width_below) / 2, size) for left, size in below]
    parts = []
    for i, (left, size) in enumerate(above, start=student.start):
        kind = "kept" if tokens.kept[i] else "dropped"
        unmapped = isnan(tokens.guidance[i])
        links = [
            _link(below[t - teacher.start], left + size / 2, kind)
            for t in range(*tokens.teacher_spans[i].tolist())
        ]
        chip = _chip(tokens.student_pieces[i], left, size, MARGIN, kind, unmapped=unmapped)
        arrow = [_arrow_head(left + size / 2)] if links and kind == "kept" else []
        parts.append(tag("g", tag("title", _hint(tokens, i)), *links, *arrow, *chip))
    for t, (left, size) in enumerate(below, start=teacher.start):
        parts += _chip(tokens.teacher_pieces[t], left, size, MARGIN + CHIP + LINK, "teacher")
    height = 2 * (CHIP + MARGIN) + LINK
    sizes = {"width": f"{width:.1f}", "height": f"{height:.1f}"}
    return tag("svg", *parts, viewBox=f"0 0 {width:.1f} {height:.1f}", **sizes)


def _places(pieces: list[str]) -> tuple[list[tuple[float, float]], float]:
    """Return (left, width) of each token's chip, and the width of them all."""
    places, left = [], 0.0
    for piece in pieces:
        size = max(display_width(piece), 1) * COLUMN + 2 * PADDING
        places.append((left, size))
        left += size + GAP
    return places, max(left - GAP, 0)


def _chip(
    piece: str, left: float, size: float, top: float, kind: str, *, unmapped: bool = False
) -> list[Element]:
    box = {"x": left, "y": top, "width": size, "height": CHIP}
    return [
        tag(
            "rect",
            **{name: f"{value:.1f}" for name, value in box.items()},
            rx="4",
            class_=f"{kind} unmapped" if unmapped else kind,
        ),
        tag(
            "text",
            piece,
            x=f"{left + PADDING:.1f}",
            y=f"{top + CHIP / 2:.1f}",
            textLength=f"{size - 2 * PADDING:.1f}",
            lengthAdjust="spacingAndGlyphs",
            class_=kind,
        ),
    ]


def _link(place: tuple[float, float], x: float, kind: str) -> Element:
    left, size = place
    ends = {"x1": left + size / 2, "y1": MARGIN + CHIP + LINK, "x2": x, "y2": MARGIN + CHIP + 5}
    return tag("line", **{name: f"{end:.1f}" for name, end in ends.items()}, class_=kind)


def _arrow_head(x: float) -> Element:
    tip = MARGIN + CHIP + 1
    points = f"{x:.1f},{tip:.1f} {x - 4:.1f},{tip + 7:.1f} {x + 4:.1f},{tip + 7:.1f}"
    return tag("polygon", points=points, class_="head")


def _hint(tokens: KeptTokens, i: int) -> str:
    student, teacher = tokens.student_losses[i], tokens.guidance[i]
    verdict = "kept" if tokens.kept[i] else "dropped"
    first, end = tokens.teacher_spans[i].tolist()
    if isnan(student):
        return f"{tokens.student_pieces[i]}: no context, no loss"
    if isnan(teacher):
        return f"{tokens.student_pieces[i]}: student loss {student:.2f}, unmapped: {verdict}"
    covering = " | ".join(tokens.teacher_pieces[first:end])
    return (
        f"{tokens.student_pieces[i]}: student loss {student:.2f}, teacher loss {teacher:.2f} "
        f"({covering}), difference {student - teacher:+.2f}: {verdict}"
    )
