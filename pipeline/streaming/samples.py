"""Samples by number, from local or cached shards, verified on reading."""

import json
import mmap
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.cache import ShardCache
from pipeline.dataset.files import Dataset
from pipeline.packing.saved_plans import SampleTable
from pipeline.recent import Recent
from pipeline.streaming.damage import QuarantinedSample
from pipeline.streaming.kernels import SampleTensors
from schemas.document import SAMPLE_VERSION, SCHEMA_VERSION, decode_document, tokens_over
from schemas.errors import RESTORE, DamagedSampleError, DamagedShardError, SchemaVersionError
from schemas.safetensors_view import read_header, vector_place, view_tensor

_TENSORS = ("student.input_ids", "teacher.input_ids", "span.advance", "span.width")
"""As in `SampleTensors`."""
MAX_OPEN_SHARDS = 64
_MAX_KNOWN_SAMPLES = 4096


class SampleReader:
    """Reads samples by number; keeps shards open. Copies for other processes open their own."""

    def __init__(
        self,
        dataset: Dataset,
        table: SampleTable,
        cache: ShardCache | None,
        unusable: dict[int, DamagedShardError],
    ) -> None:
        """Read through `cache`, or in place if the dataset is local.

        Samples of `unusable` shards raise those errors.
        """
        self._dataset = dataset
        self._table = table
        self._cache = cache
        self._shard_starts: list[int] = table.shard_document_starts.tolist()
        self._open: Recent[int, NDArray[np.uint8]] = Recent(MAX_OPEN_SHARDS)
        self._unusable = unusable
        self._verified: Recent[int, SampleTensors] = Recent(_MAX_KNOWN_SAMPLES)

    def locate(self, document_index: int, *, keep: bool) -> tuple[NDArray[np.uint8], SampleTensors]:
        """Return a sample's verified bytes, and the places of its tensors.

        `keep` remembers it as verified, for a document of many segments. DamagedShardError,
        DamagedSampleError or SchemaVersionError if it is unusable.
        """
        shard_index = self._shard_of(document_index)
        start = int(self._table.payload_offset[document_index])
        stop = start + int(self._table.payload_bytes[document_index])
        sample = self._shard(shard_index)[start:stop]
        if not keep:
            return sample, self._verify(document_index, sample)
        verify = partial(self._verify, document_index, sample)
        return sample, self._verified.get(document_index, verify)

    def _verify(self, document_index: int, sample: NDArray[np.uint8]) -> SampleTensors:
        found, expected = zlib.crc32(sample), int(self._table.crc32[document_index])
        if found != expected:
            raise self.contradiction(
                document_index, f"its CRC-32 is {found:08x}, the index says {expected:08x}"
            )
        try:
            return self._read_header(document_index, sample)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, SchemaVersionError):
                raise
            raise self.contradiction(document_index, f"no usable header ({error})") from error

    def learned_tokens(
        self, document_index: int, sample: NDArray[np.uint8], *, text_only: bool
    ) -> NDArray[np.int64]:
        """Return a chat's labels as ranges of student tokens, [L, 2].

        With `text_only`, only those that cover a learned byte. DamagedSampleError if they can't be
        read.
        """
        try:
            header, body = read_header(sample.data)
            if text_only:
                document = decode_document(sample.data)
                assert document.chat is not None
                return tokens_over(document.student.byte_offsets, document.chat.learned)
            found = view_tensor(sample.data, body, header["student.learned"]).astype(np.int64)
            flat = found.reshape(-1)
            number = int(self._table.num_student_tokens[document_index])
            if found.shape[1:] != (2,) or (np.diff(flat) < 0).any() or flat.max(initial=0) > number:
                raise ValueError(f"student.learned isn't ranges of {number} tokens")
        except (KeyError, TypeError, ValueError) as error:
            what = f"what of the chat is learned can't be read ({error})"
            raise self.contradiction(document_index, what) from error
        return found

    def contradiction(self, document_index: int, what: str) -> DamagedSampleError:
        """Return the error for a sample that contradicts itself or the index."""
        return DamagedSampleError(f"{self._where(document_index)}: {what}; {RESTORE}")

    def describe(self, document_index: int, error: ValueError) -> QuarantinedSample:
        """Return an unusable sample's entry."""
        num_student_tokens = int(self._table.num_student_tokens[document_index])
        return QuarantinedSample(*self._names(document_index), num_student_tokens, str(error))

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch remote shards in the background."""
        if self._cache is not None:
            self._cache.prefetch([self._dataset.shard(shard_index) for shard_index in shards])

    def _shard_of(self, document_index: int) -> int:
        return bisect_right(self._shard_starts, document_index) - 1

    def _shard(self, shard_index: int) -> NDArray[np.uint8]:
        if shard_index in self._unusable:
            raise self._unusable[shard_index]
        try:
            return self._open.get(shard_index, partial(self._map, shard_index))
        except DamagedShardError as error:
            self._unusable[shard_index] = error
            raise

    def _map(self, shard_index: int) -> NDArray[np.uint8]:
        listed = self._dataset.shard(shard_index)
        cache, dataset = self._cache, self._dataset
        with cache.open(listed) if cache else dataset.open_shard(shard_index) as file:
            num_bytes = file.seek(0, 2)
            if num_bytes != listed.num_bytes:
                raise DamagedShardError(
                    f"{listed.url} has {num_bytes} bytes, the manifest says {listed.num_bytes}: "
                    f"{RESTORE}"
                )
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def _read_header(self, document_index: int, sample: NDArray[np.uint8]) -> SampleTensors:
        """Return the tensors' places, after checking all that kernels rely on."""
        header, body = read_header(sample.data)
        version = header["__metadata__"]["schema_version"]
        if version != SAMPLE_VERSION:
            raise SchemaVersionError(self._where(document_index), version, SCHEMA_VERSION)
        num_student = int(self._table.num_student_tokens[document_index])
        num_teacher = int(self._table.num_teacher_tokens[document_index])
        lengths = (num_student, num_teacher, num_student, num_student)
        # A list: a generator makes rows a tenth slower.
        student_ids, teacher_ids, advance, width = [
            vector_place(header[name], length, body, len(sample))
            for name, length in zip(_TENSORS, lengths, strict=True)
        ]
        return student_ids, teacher_ids, advance, width

    def _names(self, document_index: int) -> tuple[str, str, str]:
        """Return a document's shard, key and id; key and id are "" without an index."""
        shard_index = self._shard_of(document_index)
        record = self._dataset.manifest.shards[shard_index]
        try:
            index = self._dataset.read_index(shard_index, with_names=True)
        except (OSError, DamagedShardError):
            return record.file, "", ""
        place = document_index - self._shard_starts[shard_index]
        return record.file, index.key[place], index.document_id[place]

    def _where(self, document_index: int) -> str:
        shard_name, key, document_id = self._names(document_index)
        return f"sample {key} (document {json.dumps(document_id)}) in {shard_name}"
