"""One text as several tokenizers see it, and how the first maps to the others (paper, Fig. 2)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from pipeline.drawing.blocks import Block, PreviewDocument, ShownTokens, make_blocks, show_bytes
from pipeline.drawing.formatting import format_count, format_plural, format_table
from pipeline.drawing.page_blocks import BLOCK_STYLE, draw_block
from pipeline.drawing.terminal_blocks import LEGEND, draw_document
from pipeline.drawing.web_page import render_page, tag
from pipeline.tokenization import Tokenizer

_STYLE = "td { padding: .15rem 1.2rem .15rem 0; } td.number { text-align: right; }\n"


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
        title,
        tag("h1", title),
        text,
        tag("table", *counts),
        *alignments,
        style=BLOCK_STYLE + _STYLE,
    )


def _pieces(text: bytes, tokens: TokenBatch) -> list[str]:
    return [show_bytes(text[start:end]) or "∅" for start, end in tokens.byte_offsets.tolist()]


def _blocks(text: bytes, aligned: AlignedBatch) -> tuple[Block, ...]:
    student, teacher = (
        ShownTokens.of_text(text, tokens.input_ids, tokens.byte_offsets)
        for tokens in (aligned.student, aligned.teacher)
    )
    return make_blocks(student, teacher, aligned.teacher_spans)


def _as_document(blocks: Sequence[Block]) -> PreviewDocument:
    num_student = sum(len(block.student) for block in blocks)
    num_teacher = sum(len(block.teacher) for block in blocks)
    return PreviewDocument("", "", "", num_student, num_teacher, 0, 0, True, tuple(blocks))
