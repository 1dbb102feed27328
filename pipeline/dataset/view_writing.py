"""Write a view of a shard: its documents, tokenized anew on one side and aligned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.alignment import align_tokens
from pipeline.alignment.align import find_failures
from pipeline.alignment.kernels import find_cut_points
from pipeline.alignment.quality import AlignmentStatistics, measure_documents
from pipeline.batches import AlignedBatch, SourceDocument, TokenBatch
from pipeline.dataset.view_encoding import encode_views
from pipeline.tokenization import Tokenizer
from schemas.document import AlignedDocument, Tokens, tiles_text
from schemas.index import CUT_STRIDE
from schemas.manifest import ShardRecord, ViewFileRecord
from schemas.view_file import VIEW_MAGIC, Side
from schemas.view_index import ViewIndex


@dataclass(frozen=True)
class WrittenView:
    """What a finished view of a shard holds.

    Attributes:
        index: where each document lies.
        num_bytes: size of the view's file.
        sha256: 64 hex digits of it.
        statistics: of the documents that are not left out.
    """

    index: ViewIndex
    num_bytes: int
    sha256: str
    statistics: AlignmentStatistics


class ViewWriter:
    """Writes one shard's view, some documents at a time; equal documents give equal bytes."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, side: Side) -> None:
        """Write to a file opened for binary writing, which stays open.

        Args:
            file: only `write` is called.
            tokenizer: the view's.
            side: which one its tokens replace.
        """
        self.num_bytes = 0
        self._file, self._tokenizer, self._side = file, tokenizer, side
        self._hash = sha256()
        self._indices: list[ViewIndex] = []
        self._statistics: list[AlignmentStatistics] = []
        self._write(VIEW_MAGIC)

    def add(self, documents: Sequence[AlignedDocument], texts: Sequence[bytes]) -> None:
        """Append documents, in the shard's order.

        Args:
            documents: as the shard holds them.
            texts: theirs.
        """
        batch, kept = _align(documents, texts, self._tokenizer, self._side)
        encoded = encode_views(batch, self._side)
        statistics, quality = measure_documents(batch)
        cuts = find_cut_points(
            batch.student.byte_offsets,
            batch.student.cu_tokens,
            batch.teacher.byte_offsets,
            batch.teacher.cu_tokens,
            batch.teacher_spans,
            CUT_STRIDE,
        )
        own: TokenBatch = getattr(batch, self._side)
        index = ViewIndex(
            payload_bytes=encoded.payload_bytes,
            crc32=encoded.crc32,
            num_tokens=np.diff(own.cu_tokens),
            cut_starts=cuts[0],
            cut_student=cuts[1],
            cut_teacher=cuts[2],
            num_mapped=quality.num_mapped,
            byte_iou_sum=quality.byte_iou_sum.astype(np.float32),
        )
        self._indices.append(_spread(index, kept))
        self._statistics.append(statistics)
        self._write(memoryview(encoded.data))

    def close(self) -> WrittenView:
        """Return what was written; the file stays open."""
        return WrittenView(
            index=_concatenate(self._indices),
            num_bytes=self.num_bytes,
            sha256=self._hash.hexdigest(),
            statistics=AlignmentStatistics.merge(self._statistics),
        )

    def _write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)
        self.num_bytes += len(data)


def view_file_record(
    written: WrittenView, shard: ShardRecord, names: tuple[str, str], index: bytes
) -> ViewFileRecord:
    """Return the manifest's record of a shard's view.

    Args:
        written: from `ViewWriter.close`.
        shard: the shard that was read.
        names: the names of the view's file and of its index.
        index: the index file's bytes.
    """
    return ViewFileRecord(
        shard=shard.file,
        shard_sha256=shard.sha256,
        file=names[0],
        num_bytes=written.num_bytes,
        sha256=written.sha256,
        index_file=names[1],
        index_num_bytes=len(index),
        index_sha256=sha256(index).hexdigest(),
        num_tokens=int(written.index.num_tokens.sum()),
        num_left_out=len(written.index.left_out),
    )


def _align(
    documents: Sequence[AlignedDocument], texts: Sequence[bytes], tokenizer: Tokenizer, side: Side
) -> tuple[AlignedBatch, NDArray[np.bool_]]:
    """Return documents aligned with their other side, and which of them could be: bool [D]."""
    other = "student" if side == "teacher" else "teacher"
    sides = {
        side: tokenizer.tokenize_batch(texts),
        other: _stack(
            [getattr(d, other) for d in documents], [d.num_text_bytes for d in documents]
        ),
    }
    kept = np.ones(len(documents), np.bool_)
    kept[list(find_failures(sides["student"], sides["teacher"]))] = False
    if not kept.all():
        places = np.flatnonzero(kept)
        chosen = [documents[place] for place in places], [texts[place] for place in places]
        return _align(*chosen, tokenizer, side)[0], kept
    batch = AlignedBatch(
        [
            SourceDocument(document.document_id, text)
            for document, text in zip(documents, texts, strict=True)
        ],
        sides["student"],
        sides["teacher"],
        align_tokens(sides["student"], sides["teacher"]),
    )
    return batch, kept


def _stack(parts: Sequence[Tokens], num_text_bytes: Sequence[int]) -> TokenBatch:
    """Return stored tokens as tokenizers give them."""
    tiles = [
        tiles_text(tokens.byte_offsets, size)
        for tokens, size in zip(parts, num_text_bytes, strict=True)
    ]
    offsets = [np.empty((0, 2), np.int64), *(tokens.byte_offsets for tokens in parts)]
    input_ids = [np.empty(0, np.int64), *(tokens.input_ids for tokens in parts)]
    return TokenBatch(
        input_ids=np.concatenate(input_ids).astype(np.uint32),
        byte_offsets=np.concatenate(offsets).astype(np.int32),
        cu_tokens=np.cumsum([0, *map(len, parts)], dtype=np.int64),
        tiles=np.array(tiles, np.bool_),
    )


def _spread(index: ViewIndex, kept: NDArray[np.bool_]) -> ViewIndex:
    """Return the index of all documents, of which only some could be aligned."""
    if kept.all():
        return index
    values = {}
    for name in ("payload_bytes", "crc32", "num_tokens", "num_mapped", "byte_iou_sum"):
        own = getattr(index, name)
        values[name] = np.zeros(len(kept), own.dtype)
        values[name][kept] = own
    counts = np.zeros(len(kept), np.int64)
    counts[kept] = np.diff(index.cut_starts)
    return replace(index, cut_starts=np.cumsum(np.concatenate([[0], counts])), **values)


def _concatenate(indices: Sequence[ViewIndex]) -> ViewIndex:
    names = ("payload_bytes", "crc32", "num_tokens", "cut_student", "cut_teacher", "num_mapped")
    nothing = np.empty(0, np.int64)
    columns = {
        name: np.concatenate([nothing, *(getattr(i, name) for i in indices)]) for name in names
    }
    iou = [np.empty(0, np.float32), *(index.byte_iou_sum for index in indices)]
    counts = [np.zeros(1, np.int64), *(np.diff(index.cut_starts) for index in indices)]
    return ViewIndex(
        cut_starts=np.cumsum(np.concatenate(counts), dtype=np.int64),
        byte_iou_sum=np.concatenate(iou),
        **columns,
    )
