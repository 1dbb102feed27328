"""How well equal chunks of two tokenizations match, against alignment by token (paper, Fig. 3).

Both token sequences of a text are cut into the same number of equal chunks; chunk i of the student
and chunk i of the teacher then cover two ranges of bytes. Their intersection over union (IoU) and
over the student's range (IoS) say how much of the guidance would come from other text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment import align_batch, chunk_of_token
from pipeline.batches import AlignedBatch, Ranges, SourceDocument
from pipeline.figure_charts import Line, line_chart
from pipeline.formatting import format_count, format_table
from pipeline.quality import measure_alignment, overlap_ratios
from pipeline.tokenization import Tokenizer

PAPER_CHUNKS = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class ChunkingQuality:
    """IoU and IoS, means in 0 to 1.

    Attributes:
        num_texts: texts measured.
        num_chunks: the numbers of chunks tried.
        chunk_iou: mean over all chunks, one for each number.
        chunk_ios: likewise.
        token_iou: mean over mapped tokens of the token-level alignment.
        token_ios: likewise.
    """

    num_texts: int
    num_chunks: tuple[int, ...]
    chunk_iou: tuple[float, ...]
    chunk_ios: tuple[float, ...]
    token_iou: float
    token_ios: float


def join_documents(documents: Sequence[str], text_bytes: int) -> list[SourceDocument]:
    r"""Join neighbouring documents until each text has `text_bytes` bytes or more.

    A text must have more tokens than chunks. What is left at the end and is shorter is left out.

    Example:
        >>> [d.text for d in join_documents(["ab", "c", "d"], 4)]
        [b'ab\n\nc']
    """
    joined: list[SourceDocument] = []
    parts: list[str] = []
    size = 0
    for document in documents:
        parts.append(document)
        size += len(document.encode()) + 2 * (len(parts) > 1)
        if size >= text_bytes:
            joined.append(SourceDocument(f"text {len(joined)}", "\n\n".join(parts).encode()))
            parts, size = [], 0
    return joined


def measure_chunking(
    texts: Sequence[SourceDocument],
    student: Tokenizer,
    teacher: Tokenizer,
    num_chunks: Sequence[int] = PAPER_CHUNKS,
) -> ChunkingQuality:
    """Cut both tokenizations into chunks and compare with token-level alignment.

    Raises:
        ValueError: no texts, a text that can't be tokenized, or one with fewer tokens than chunks.

    Example:
        >>> measure_chunking(join_documents(documents, 8000), llama2, qwen2_5).token_ios
        1.0

    Source: section 2 and Fig. 3, in bytes.
    """
    if not texts:
        raise ValueError("no text is long enough: give more documents or lower --text-bytes")
    batch = align_batch(texts, student, teacher)
    for document, reason in batch.failures:
        raise ValueError(f"{document.document_id} can't be aligned: {reason}")
    _require_tokens(batch, max(num_chunks))
    means = [_chunk_quality(batch, count) for count in num_chunks]
    tokens = measure_alignment(batch)
    return ChunkingQuality(
        num_texts=len(texts),
        num_chunks=tuple(num_chunks),
        chunk_iou=tuple(iou for iou, _ in means),
        chunk_ios=tuple(ios for _, ios in means),
        token_iou=tokens.byte_iou,
        token_ios=tokens.byte_ios,
    )


def describe_chunking(quality: ChunkingQuality) -> Iterator[str]:
    """Yield a table for the terminal."""
    yield f"{format_count(quality.num_texts)} texts; means over chunks, in bytes"
    rows = [["aligned by", "IoU", "IoS"]]
    for count, iou, ios in zip(
        quality.num_chunks, quality.chunk_iou, quality.chunk_ios, strict=True
    ):
        rows.append([f"{count} chunks", f"{100 * iou:.2f} %", f"{100 * ios:.2f} %"])
    token = [f"{100 * value:.2f} %" for value in (quality.token_iou, quality.token_ios)]
    yield from format_table([*rows, ["tokens", *token]], align="<>>")


def draw_chunking(quality: ChunkingQuality, *, student: str, teacher: str) -> Element:
    """Return the chart."""

    def percent(values: Sequence[float]) -> list[float]:
        return [100 * value for value in values]

    same = len(quality.num_chunks)
    lines = [
        Line("tokens, IoS", percent([quality.token_ios] * same), 2, level=True),
        Line("tokens, IoU", percent([quality.token_iou] * same), 3, level=True),
        Line("chunks, IoS", percent(quality.chunk_ios), 0),
        Line("chunks, IoU", percent(quality.chunk_iou), 1),
    ]
    return line_chart(
        f"Text shared by student {student} and teacher {teacher}",
        [str(count) for count in quality.num_chunks],
        lines,
        x_label="equal chunks per text (dashed: aligned by token)",
        y_label="%",
        y_range=(0, 100),
    )


def _chunk_quality(batch: AlignedBatch, num_chunks: int) -> tuple[float, float]:
    ranges = []
    for tokens in (batch.student, batch.teacher):
        bounds = zip(tokens.cu_tokens[:-1], tokens.cu_tokens[1:], strict=True)
        ranges.append(
            np.concatenate([_chunk_ranges(tokens.byte_offsets[a:b], num_chunks) for a, b in bounds])
        )
    iou, ios = overlap_ratios(*ranges)
    return float(np.nanmean(iou)), float(np.nanmean(ios))


def _chunk_ranges(byte_offsets: Ranges, num_chunks: int) -> NDArray[np.int64]:
    """Return the bytes that each chunk of a text covers, int64 [num_chunks, 2]."""
    chunks = chunk_of_token(len(byte_offsets), num_chunks)
    first = np.searchsorted(chunks, np.arange(num_chunks), side="left")
    last = np.searchsorted(chunks, np.arange(num_chunks), side="right") - 1
    return np.stack([byte_offsets[first, 0], byte_offsets[last, 1]], axis=1)


def _require_tokens(batch: AlignedBatch, num_chunks: int) -> None:
    for side, tokens in (("student", batch.student), ("teacher", batch.teacher)):
        lengths = np.diff(tokens.cu_tokens)
        shortest = int(lengths.argmin())
        if lengths[shortest] < num_chunks:
            raise ValueError(
                f"{batch.documents[shortest].document_id} has {lengths[shortest]} {side} tokens, "
                f"fewer than {num_chunks} chunks: raise --text-bytes or lower --chunks"
            )
