"""One text in several tokenizations, the first aligned with the others (paper, Fig. 2)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument, TokenBatch
from pipeline.drawing.blocks import PreviewDocument, lay_out, show_bytes
from pipeline.drawing.formatting import format_count, format_plural, format_table
from pipeline.drawing.page_blocks import render_preview
from pipeline.drawing.terminal_blocks import LEGEND, draw_document
from pipeline.drawing.web_page import tag
from pipeline.tokenization import Tokenizer


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A UTF-8 text, its tokens by tokenizer, and the alignments."""

    text: bytes
    tokens: Mapping[str, TokenBatch]
    pairs: tuple[PreviewDocument, ...]

    def pieces(self, name: str) -> str:
        """Return a tokenizer's tokens for people."""
        ranges = self.tokens[name].byte_offsets.tolist()
        return " | ".join(show_bytes(self.text[start:end]) or "∅" for start, end in ranges)


def tokenize_text(text: str, tokenizers: Mapping[str, Tokenizer]) -> TokenizedText:
    """Tokenize a text without BOS, and align the first tokenizer with the others.

    ValueError if a tokenizer fails.
    """
    data = text.encode("utf-8", "surrogatepass")
    student, *teachers = tokenizers
    tokens: dict[str, TokenBatch] = {}
    pairs = []
    for name in teachers or [student]:
        aligned = align_batch([SourceDocument("", data)], tokenizers[student], tokenizers[name])
        for _, reason in aligned.failures:
            raise ValueError(f"{student} and {name} can't align this text: {reason}")
        tokens |= {student: aligned.student, name: aligned.teacher}
        sides = (aligned.student, aligned.teacher, aligned.teacher_spans)
        title = f"student {student} above, teacher {name} below"
        pairs.append(lay_out(title, data, *sides, num_text_bytes=len(data)))
    return TokenizedText(data, tokens, tuple(pairs if teachers else ()))


def describe_text(result: TokenizedText, *, width: int) -> Iterator[str]:
    """Yield lines for the terminal."""
    yield f"{show_bytes(result.text)} ({format_plural(len(result.text), 'byte')})"
    yield ""
    rows = [["tokenizer", "tokens", "bytes/token", ""]]
    for name, tokens in result.tokens.items():
        count = len(tokens.input_ids)
        each = f"{len(result.text) / max(count, 1):.2f}"
        rows.append([name, format_count(count), each, result.pieces(name)])
    yield from format_table(rows, align="<>><")
    for pair in result.pairs:
        yield ""
        yield from draw_document(pair, width=width)
    yield LEGEND


def draw_text(result: TokenizedText) -> str:
    """Return a page."""
    counts = [
        tag(
            "tr",
            tag("td", name),
            tag("td", format_count(len(tokens.input_ids)), class_="number"),
            tag("td", result.pieces(name), class_="mono"),
        )
        for name, tokens in result.tokens.items()
    ]
    title = "One text, several tokenizers"
    text = tag("p", show_bytes(result.text), class_="mono")
    return render_preview(title, [tag("h1", title), text, tag("table", *counts)], result.pairs)
