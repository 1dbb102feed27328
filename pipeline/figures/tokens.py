"""One text as several tokenizers see it, and how the first maps to the others (paper, Fig. 2)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from pipeline.drawing.blocks import Block, PreviewDocument, PreviewToken, find_blocks, show_bytes
from pipeline.drawing.formatting import format_count, format_plural, format_table
from pipeline.drawing.page_blocks import draw_block
from pipeline.drawing.terminal_blocks import LEGEND, draw_document
from pipeline.drawing.web_page import render_page, tag
from pipeline.tokenization import Tokenizer

_STYLE = """
td { padding: .15rem 1.2rem .15rem 0; } td.number { text-align: right; }
.tokens { margin: .9rem 0; line-height: 0; }
.tokens svg { margin: 0 5px 14px 0; max-width: 100%; height: auto; vertical-align: top; }
svg text { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--ink); dominant-baseline: central; white-space: pre; }
rect.student { fill: var(--student-tint); stroke: var(--student); }
rect.teacher { fill: var(--teacher-tint); stroke: var(--teacher); }
rect.unmapped { fill: none; stroke: var(--bad); stroke-dasharray: 4 3; }
text.unmapped { fill: var(--bad); } line { stroke: var(--soft); }
"""


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """One text by several tokenizers.

    Attributes:
        text: UTF-8 bytes.
        tokens: each tokenizer's tokens, by its name.
        blocks: the first tokenizer's tokens laid out over each other one's, by its name.
        num_unmapped: tokens of the first that nothing of the other covers, by its name.
    """

    text: bytes
    tokens: Mapping[str, TokenBatch]
    blocks: Mapping[str, tuple[Block, ...]]
    num_unmapped: Mapping[str, int]


def tokenize_text(text: str, tokenizers: Mapping[str, Tokenizer]) -> TokenizedText:
    """Tokenize a text, without BOS, and align the first tokenizer with each of the others.

    Raises:
        ValueError: a tokenizer can't tokenize the text.

    Example:
        >>> len(tokenize_text("Probability, Uncertainty", tokenizers).tokens["llama2"].input_ids)
        7

    Source: Fig. 2.
    """
    data = text.encode("utf-8", "surrogatepass")
    document = SourceDocument("text", data)
    student, *teachers = tokenizers
    tokens: dict[str, TokenBatch] = {}
    blocks: dict[str, tuple[Block, ...]] = {}
    unmapped: dict[str, int] = {}
    for name in teachers or [student]:
        aligned = align_batch([document], tokenizers[student], tokenizers[name])
        for _, reason in aligned.failures:
            raise ValueError(f"{student} and {name} can't align this text: {reason}")
        tokens |= {student: aligned.student, name: aligned.teacher}
        blocks[name] = _blocks(data, aligned)
        unmapped[name] = int((aligned.teacher_spans[:, 0] == aligned.teacher_spans[:, 1]).sum())
    return TokenizedText(data, tokens, blocks if teachers else {}, unmapped)


def describe_text(result: TokenizedText, *, width: int, colour: bool) -> Iterator[str]:
    """Yield the counts, the tokens and the alignments for the terminal."""
    yield f"{show_bytes(result.text)} ({format_plural(len(result.text), 'byte')})"
    yield ""
    rows = [["tokenizer", "tokens", "bytes/token", ""]]
    for name, tokens in result.tokens.items():
        count = len(tokens.input_ids)
        pieces = " | ".join(_pieces(result.text, tokens))
        rows.append([name, format_count(count), f"{len(result.text) / max(count, 1):.2f}", pieces])
    yield from format_table(rows, align="<>><")
    student = next(iter(result.tokens))
    for teacher, blocks in result.blocks.items():
        yield ""
        yield f"student {student}, teacher {teacher}: {result.num_unmapped[teacher]} unmapped"
        # The first two lines would name a document and its shard.
        yield from islice(draw_document(_as_document(blocks), width=width, colour=colour), 2, None)
    yield LEGEND


def draw_text(result: TokenizedText) -> str:
    """Return a page: the counts, and each alignment drawn as in the paper."""
    counts = [
        tag(
            "tr",
            tag("td", name),
            tag("td", format_count(len(tokens.input_ids)), class_="number"),
            tag("td", " | ".join(_pieces(result.text, tokens)), class_="mono"),
        )
        for name, tokens in result.tokens.items()
    ]
    student = next(iter(result.tokens))
    alignments = []
    for teacher, blocks in result.blocks.items():
        names = (tag("span", student, class_="student"), tag("span", teacher, class_="teacher"))
        alignments += [
            tag("h2", "Student ", names[0], " above, teacher ", names[1], " below"),
            tag("div", *map(draw_block, blocks), class_="tokens"),
        ]
    title = "One text, several tokenizers"
    text = tag("p", show_bytes(result.text), class_="mono")
    return render_page(
        title, tag("h1", title), text, tag("table", *counts), *alignments, style=_STYLE
    )


def _pieces(text: bytes, tokens: TokenBatch) -> list[str]:
    return [show_bytes(text[start:end]) or "∅" for start, end in tokens.byte_offsets.tolist()]


def _blocks(text: bytes, aligned: AlignedBatch) -> tuple[Block, ...]:
    spans = aligned.teacher_spans
    num_teacher = len(aligned.teacher.input_ids)
    student = _preview_tokens(text, aligned.student, spans)
    teacher = _preview_tokens(text, aligned.teacher, _covering(spans, num_teacher))
    return tuple(
        Block(tuple(student[slice(*s)]), tuple(teacher[slice(*t)]))
        for s, t in find_blocks(spans, num_teacher)
    )


def _preview_tokens(
    text: bytes, tokens: TokenBatch, mapped: NDArray[np.int64]
) -> list[PreviewToken]:
    pieces = _pieces(text, tokens)
    return [
        PreviewToken(index, token_id, piece, (start, end), (first, last), piece.startswith("<0x"))
        for index, (token_id, piece, (start, end), (first, last)) in enumerate(
            zip(
                tokens.input_ids.tolist(),
                pieces,
                tokens.byte_offsets.tolist(),
                mapped.tolist(),
                strict=True,
            )
        )
    ]


def _covering(spans: NDArray[np.int64], num_teacher: int) -> NDArray[np.int64]:
    """Return the range of student tokens whose spans hold each teacher token, int64 [M, 2]."""
    mapped = np.flatnonzero(spans[:, 1] > spans[:, 0])
    starts, ends = spans[mapped, 0], spans[mapped, 1]
    places = np.arange(num_teacher)
    first = np.searchsorted(ends, places, side="right")
    last = np.searchsorted(starts, places, side="right")
    bounds = np.append(mapped, len(spans))
    return np.where(
        (first < last)[:, None], np.stack([bounds[first], bounds[last - 1] + 1], axis=1), 0
    )


def _as_document(blocks: Sequence[Block]) -> PreviewDocument:
    num_student = sum(len(block.student) for block in blocks)
    num_teacher = sum(len(block.teacher) for block in blocks)
    return PreviewDocument("", "", "", num_student, num_teacher, 0, 0, True, tuple(blocks))
