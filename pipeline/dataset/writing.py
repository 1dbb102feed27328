"""Write aligned documents as WebDataset tar shards with an index, and read them back, verified."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import BinaryIO

import numpy as np

from pipeline.alignment.kernels import find_cut_points
from pipeline.alignment.quality import AlignmentStatistics, measure_alignment
from pipeline.batches import AlignedBatch
from pipeline.dataset.encoding import TAR_BLOCK, encode_batch
from schemas.index import CUT_STRIDE, ShardIndex, concatenate_indices
from schemas.manifest import ShardRecord

END_OF_TAR = bytes(2 * TAR_BLOCK)


@dataclass(frozen=True)
class WrittenShard:
    """What a finished shard holds.

    Attributes:
        index: where each sample lies.
        num_bytes: size of the tar.
        sha256: 64 hex digits of the tar.
        statistics: of its documents.
    """

    index: ShardIndex
    num_bytes: int
    sha256: str
    statistics: AlignmentStatistics


class ShardWriter:
    """Writes one tar, batch by batch; the same batches always give the same bytes."""

    def __init__(self, file: BinaryIO, *, keep_text: bool = False) -> None:
        """Write to a file opened for binary writing, which stays open.

        Args:
            file: only `write` is called.
            keep_text: whether samples hold their text.
        """
        self.num_bytes = 0
        self._file = file
        self._keep_text = keep_text
        self._hash = sha256()
        self._indices: list[ShardIndex] = []
        self._statistics: list[AlignmentStatistics] = []
        self._background = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def add(self, batch: AlignedBatch) -> None:
        """Append a batch's documents, in order."""
        if not batch.documents:
            return
        encoded = encode_batch(batch, keep_text=self._keep_text)
        cuts = find_cut_points(
            batch.student.byte_offsets,
            batch.student.cu_tokens,
            batch.teacher.byte_offsets,
            batch.teacher.cu_tokens,
            batch.teacher_spans,
            CUT_STRIDE,
        )
        index = ShardIndex(
            key=encoded.keys,
            document_id=[document.document_id for document in batch.documents],
            payload_offset=encoded.payload_offset + self.num_bytes,
            payload_bytes=encoded.payload_bytes,
            crc32=encoded.crc32,
            num_text_bytes=np.array([len(document.text) for document in batch.documents], np.int64),
            num_student_tokens=np.diff(batch.student.cu_tokens),
            num_teacher_tokens=np.diff(batch.teacher.cu_tokens),
            cut_starts=cuts[0],
            cut_student=cuts[1],
            cut_teacher=cuts[2],
        )
        self._indices.append(index)
        self._statistics.append(measure_alignment(batch))
        self._append(memoryview(encoded.members))

    def close(self) -> WrittenShard:
        """Write the tar's end and return what was written; the file stays open."""
        self._append(memoryview(END_OF_TAR))
        self._wait()
        self._background.shutdown()
        return WrittenShard(
            index=concatenate_indices(self._indices),
            num_bytes=self.num_bytes,
            sha256=self._hash.hexdigest(),
            statistics=AlignmentStatistics.merge(self._statistics),
        )

    def _append(self, data: memoryview) -> None:
        """Hash and write in the background, while the next batch is tokenized."""
        self._wait()
        self._pending = self._background.submit(self._write, data)
        self.num_bytes += len(data)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _write(self, data: memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)


def shard_record(written: WrittenShard, file: str, index_file: str, index: bytes) -> ShardRecord:
    """Return the manifest's record of a shard.

    Args:
        written: from `ShardWriter.close`.
        file: the tar's final name.
        index_file: the index's final name.
        index: the index file's bytes.
    """
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
