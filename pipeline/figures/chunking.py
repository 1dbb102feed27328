"""How well equal chunks of two tokenizations match, compared with token alignment (paper, Fig. 3).

Documents are laid end to end and cut into sequences of student tokens, and both sides of these into
equally many chunks, each a range of bytes. Intersection over union (IoU) and over the student's
range (IoS) show how much guidance would come from other text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment import align_batch
from pipeline.alignment.quality import measure_documents, overlap_ratios
from pipeline.batches import AlignedBatch, Ranges, SourceDocument
from pipeline.drawing.charts import line_chart
from pipeline.drawing.formatting import format_count, format_plural, format_table
from pipeline.tokenization import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Ratios = tuple[float, float]
"""IoU and IoS, means in 0 to 1."""


@dataclass(frozen=True)
class ChunkingQuality:
    """Means over chunks, by their number, and over single tokens."""

    num_sequences: int
    seq_length: int
    chunks: Mapping[int, Ratios]
    tokens: Ratios


def measure_chunking(
    texts: Sequence[str],
    student: Tokenizer,
    teacher: Tokenizer,
    num_chunks: Sequence[int],
    *,
    seq_length: int,
) -> ChunkingQuality:
    """Compare `num_chunks` with token-level alignment.

    Sequences have `seq_length` student tokens; a shorter rest is dropped.

    Raises:
        ValueError: a text that can't be tokenized, or too few tokens for a sequence or its chunks.

    Source: section 2 and Fig. 3, in bytes.
    """
    documents = [
        SourceDocument(f"document {n}", text.encode()) for n, text in enumerate(texts, start=1)
    ]
    batch = align_batch(documents, student, teacher)
    for document, reason in batch.failures:
        raise ValueError(f"{document.document_id} can't be aligned: {reason}")
    sequences = _cut_sequences(batch, seq_length)
    _require_tokens(sequences, seq_length, max(num_chunks))
    tokens = measure_documents(batch)[0]
    return ChunkingQuality(
        num_sequences=len(sequences),
        seq_length=seq_length,
        chunks={count: _chunk_quality(sequences, count) for count in num_chunks},
        tokens=(tokens.byte_iou, tokens.byte_ios),
    )


def describe_chunking(quality: ChunkingQuality) -> Iterator[str]:
    """Yield a table for the terminal."""
    yield (
        f"{format_plural(quality.num_sequences, 'sequence')} of "
        f"{format_count(quality.seq_length)} student tokens; means over chunks, in bytes"
    )
    ratios = {f"{count} chunks": ratios for count, ratios in quality.chunks.items()}
    rows = [["aligned by", "IoU", "IoS"]]
    for name, (iou, ios) in {**ratios, "tokens": quality.tokens}.items():
        rows.append([name, f"{100 * iou:.2f} %", f"{100 * ios:.2f} %"])
    yield from format_table(rows, align="<>>")


def draw_chunking(quality: ChunkingQuality, student: str, teacher: str) -> "Figure":
    """Return the chart."""
    by_chunks = quality.chunks.values()
    lines = {
        "tokens, IoS": [100 * quality.tokens[1] for _ in by_chunks],
        "tokens, IoU": [100 * quality.tokens[0] for _ in by_chunks],
        "chunks, IoS": [100 * ios for _, ios in by_chunks],
        "chunks, IoU": [100 * iou for iou, _ in by_chunks],
    }
    return line_chart(
        f"Text shared by student {student} and teacher {teacher}",
        [str(count) for count in quality.chunks],
        lines,
        x_label=f"equal chunks per sequence of {format_count(quality.seq_length)} student tokens",
        y_label="share of the text, % (higher is better)",
        y_range=(0, 102),
    )


def _cut_sequences(batch: AlignedBatch, seq_length: int) -> list[tuple[Ranges, Ranges]]:
    student, teacher = _laid_end_to_end(batch)
    whole = student[: len(student) // seq_length * seq_length]
    if not len(whole):
        return []
    # A token straddling a cut belongs to the sequence in which it starts.
    starts = whole[::seq_length, 0]
    stops = np.append(starts[1:], whole[-1, 1])
    first = np.searchsorted(teacher[:, 0], starts, side="left")
    last = np.searchsorted(teacher[:, 0], stops, side="left")
    return [
        (student[number * seq_length : (number + 1) * seq_length], teacher[a:b])
        for number, (a, b) in enumerate(zip(first.tolist(), last.tolist(), strict=True))
    ]


def _laid_end_to_end(batch: AlignedBatch) -> tuple[Ranges, Ranges]:
    sizes = [len(document.text) for document in batch.documents]
    before = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
    student, teacher = (
        tokens.byte_offsets + np.repeat(before, np.diff(tokens.cu_tokens))[:, None]
        for tokens in (batch.student, batch.teacher)
    )
    return student, teacher


def _chunk_quality(sequences: Sequence[tuple[Ranges, Ranges]], num_chunks: int) -> Ratios:
    student, teacher = (
        np.concatenate([_chunk_ranges(sides[side], num_chunks) for sides in sequences])
        for side in (0, 1)
    )
    iou, ios = overlap_ratios(student, teacher)
    return float(np.nanmean(iou)), float(np.nanmean(ios))


def _chunk_ranges(byte_offsets: Ranges, num_chunks: int) -> NDArray[np.int64]:
    """Return chunks' bytes, int64 [num_chunks, 2]."""
    # Token i of n lies in chunk i * num_chunks // n.
    bounds = -(-np.arange(num_chunks + 1) * len(byte_offsets) // num_chunks)
    return np.stack([byte_offsets[bounds[:-1], 0], byte_offsets[bounds[1:] - 1, 1]], axis=1)


def _require_tokens(
    sequences: Sequence[tuple[Ranges, Ranges]], seq_length: int, num_chunks: int
) -> None:
    if not sequences:
        raise ValueError(
            f"the texts have fewer than {seq_length} student tokens, not one sequence: give more "
            "documents or lower --seq-length"
        )
    shortest = min(len(offsets) for sides in sequences for offsets in sides)
    if shortest < num_chunks:
        raise ValueError(
            f"a sequence has {shortest} tokens of one side, fewer than {num_chunks} chunks: raise "
            "--seq-length or lower --chunks"
        )
