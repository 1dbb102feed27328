"""Write aligned documents as WebDataset tar shards with an index, and read them back, verified."""

import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import BinaryIO

import fsspec
import numpy as np

from pipeline.batches import AlignedBatch
from pipeline.encoding import TAR_BLOCK, encode_batch
from pipeline.first_contact import require_answer
from pipeline.kernels import find_cut_points
from pipeline.quality import AlignmentStatistics, measure_alignment
from schemas.errors import DamagedSampleError, DamagedShardError, DatasetError
from schemas.index import CUT_STRIDE, ShardIndex, concatenate_indices
from schemas.manifest import MANIFEST_FILE, Manifest, ShardRecord, decode_manifest

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


def read_manifest(dataset: str) -> Manifest:
    """Read a dataset's manifest.

    Args:
        dataset: the folder or the manifest itself; local or anything that fsspec opens.

    Raises:
        DatasetError: no manifest there, or not a complete one.
        NoAnswerError: the store is silent.

    Example:
        >>> read_manifest("aligned").totals["num_documents"]
        1000
    """
    path = dataset if dataset.endswith(".json") else f"{dataset.rstrip('/')}/{MANIFEST_FILE}"
    require_answer(path)
    try:
        with fsspec.open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} does not exist: {dataset} is no dataset, or its align job has not finished; "
            "name a finished output folder, or run the job again to resume it"
        ) from error
    return decode_manifest(data, where=path)


def read_samples(
    file: BinaryIO, index: ShardIndex, *, shard: str
) -> Iterator[tuple[int, memoryview]]:
    """Read a shard's payloads in order, each checked against its CRC-32.

    Args:
        file: the tar, opened for binary reading and seekable.
        index: the shard's index.
        shard: its name, for errors.

    Yields:
        the sample's place in the index, and its payload.

    Raises:
        DamagedShardError: the tar ends too early.
        DamagedSampleError: a payload's CRC-32 differs.
    """
    rows = zip(index.payload_offset.tolist(), index.payload_bytes.tolist(), strict=True)
    for place, (start, size) in enumerate(rows):
        file.seek(start)
        payload = file.read(size)
        if len(payload) != size:
            raise DamagedShardError(
                f"shard {shard} ends inside sample {index.key[place]} (byte {start + size} is "
                "missing): it is cut; restore it or run beam_jobs.align again"
            )
        check_crc32(payload, int(index.crc32[place]), shard=shard, key=index.key[place])
        yield place, memoryview(payload)


def check_crc32(payload: bytes | memoryview, expected: int, *, shard: str, key: str) -> None:
    """Check a payload against the index.

    Raises:
        DamagedSampleError: with shard, key and remedy.
    """
    found = zlib.crc32(payload)
    if found != expected:
        raise DamagedSampleError(
            f"sample {key} in shard {shard} has CRC-32 {found:08x}, its index says "
            f"{expected:08x}: the payload was altered; restore the shard or run "
            "beam_jobs.align again"
        )


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
