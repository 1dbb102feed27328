"""Write aligned documents as WebDataset tar shards with an index."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.alignment.kernels import find_cut_points
from pipeline.alignment.quality import AlignmentStatistics, measure_documents
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.dataset.chat_index import index_chats
from pipeline.dataset.encoding import TAR_BLOCK, encode_batch
from schemas.index import CUT_STRIDE, METADATA_TYPES, ShardIndex, concatenate_indices
from schemas.manifest import MetadataColumn, ShardRecord

END_OF_TAR = bytes(2 * TAR_BLOCK)


@dataclass(frozen=True)
class WrittenShard:
    """A finished shard: its index, the tar's size and SHA-256, statistics."""

    index: ShardIndex
    num_bytes: int
    sha256: str
    statistics: AlignmentStatistics


class ShardWriter:
    """Writes one tar, batch by batch, in the background.

    The same batches give the same bytes.
    """

    def __init__(
        self, file: BinaryIO, *, keep_text: bool = False, metadata: Sequence[MetadataColumn] = ()
    ) -> None:
        """Write to a binary file, which stays open; only its `write` is called."""
        self._num_bytes = 0
        self._file = file
        self._keep_text = keep_text
        self._metadata = metadata
        self._hash = sha256()
        nothing = replace(concatenate_indices(()), metadata=_columns((), metadata))
        self._indices: list[ShardIndex] = [nothing]
        self._statistics: list[AlignmentStatistics] = []
        self._background = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the tar so far; waits until it is written."""
        self._wait()
        return self._num_bytes

    def add(self, batch: AlignedBatch) -> None:
        """Append a batch's documents, in order; a later call raises its errors."""
        self._wait()
        if batch.documents:
            self._pending = self._background.submit(self._append, batch)

    def close(self) -> WrittenShard:
        """Write the tar's end and return the shard; the file stays open."""
        self._wait()
        self._write(memoryview(END_OF_TAR))
        self._background.shutdown()
        return WrittenShard(
            index=concatenate_indices(self._indices),
            num_bytes=self._num_bytes,
            sha256=self._hash.hexdigest(),
            statistics=AlignmentStatistics.merge(self._statistics),
        )

    def _append(self, batch: AlignedBatch) -> None:
        encoded = encode_batch(batch, keep_text=self._keep_text)
        cuts = find_cut_points(
            student_offsets=batch.student.byte_offsets,
            student_cu=batch.student.cu_tokens,
            teacher_offsets=batch.teacher.byte_offsets,
            teacher_cu=batch.teacher.cu_tokens,
            teacher_spans=batch.teacher_spans,
            stride=CUT_STRIDE,
        )
        chats: Mapping[str, NDArray[Any]] = {}
        if batch.chats is not None:
            cuts, chats = index_chats(batch.chats, batch.student, cuts)
        statistics, quality = measure_documents(batch)
        index = ShardIndex(
            key=encoded.keys,
            document_id=[document.document_id for document in batch.documents],
            payload_offset=encoded.payload_offset + self._num_bytes,
            payload_bytes=encoded.payload_bytes,
            crc32=encoded.crc32,
            num_text_bytes=np.array([len(document.text) for document in batch.documents], np.int64),
            num_student_tokens=np.diff(batch.student.cu_tokens),
            num_teacher_tokens=np.diff(batch.teacher.cu_tokens),
            cut_starts=cuts[0],
            cut_student=cuts[1],
            cut_teacher=cuts[2],
            num_mapped=quality.num_mapped,
            byte_iou_sum=quality.byte_iou_sum.astype(np.float32),
            metadata=_columns(batch.documents, self._metadata),
            chats=chats,
        )
        self._indices.append(index)
        self._statistics.append(statistics)
        self._write(memoryview(encoded.members))

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _write(self, data: memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)
        self._num_bytes += len(data)


def _columns(
    documents: Sequence[SourceDocument], metadata: Sequence[MetadataColumn]
) -> dict[str, pa.ChunkedArray]:
    columns = {}
    for place, entry in enumerate(metadata):
        values = [document.metadata[place] for document in documents]
        columns[entry.name] = pa.chunked_array([pa.array(values, METADATA_TYPES[entry.type])])
    return columns


def shard_record(written: WrittenShard, file: str, index_file: str, index: bytes) -> ShardRecord:
    """Return the manifest's record of a shard."""
    return ShardRecord(
        file=file,
        num_bytes=written.num_bytes,
        sha256=written.sha256,
        index_file=index_file,
        index_num_bytes=len(index),
        index_sha256=sha256(index).hexdigest(),
        num_documents=len(written.index),
        num_text_bytes=int(written.index.num_text_bytes.sum()),
        num_student_tokens=int(written.index.num_student_tokens.sum()),
        num_teacher_tokens=int(written.index.num_teacher_tokens.sum()),
    )
