"""Samples through a view: one side's tokens from the shard, the other's from the view's file."""

import mmap
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.cache import ShardCache
from pipeline.dataset.files import Dataset
from pipeline.dataset.view_encoding import unpack
from pipeline.dataset.views import REMEDY, check_payload, require_view_file
from pipeline.packing.saved_plans import SampleTable
from pipeline.streaming.layout import STUDENT_IDS, TEACHER_IDS, SampleTensors
from pipeline.streaming.samples import MAX_OPEN_SHARDS, SampleReader
from schemas.errors import DamagedShardError
from schemas.manifest import ViewRecord
from schemas.view_file import PAYLOAD_HEADER, VIEW_MAGIC
from schemas.view_index import ViewIndex

_MAX_KEPT_BYTES = 64 << 20
"""Of documents that are read in many segments."""

_WORD = 4


@dataclass(frozen=True, eq=False)
class _OpenView:
    """A shard's view: its file's bytes, its index, and where payloads start, int64 [N + 1]."""

    data: NDArray[np.uint8]
    index: ViewIndex
    starts: NDArray[np.int64]


class ViewedSampleReader(SampleReader):
    """Reads samples by number, through the dataset's view; what it gives is put together anew."""

    def __init__(
        self, dataset: Dataset, view: ViewRecord, table: SampleTable, cache: ShardCache | None
    ) -> None:
        """Read `dataset`, which is seen through `view`; the rest is as in `SampleReader`."""
        super().__init__(dataset, table, cache)
        self._view = view
        # Of a sample's own tensors only the other side's ids.
        self._read = (STUDENT_IDS,) if view.side == "teacher" else (TEACHER_IDS,)
        self._open_views: OrderedDict[int, _OpenView] = OrderedDict()
        self._kept: OrderedDict[int, tuple[NDArray[np.uint8], SampleTensors]] = OrderedDict()
        self._num_kept_bytes = 0

    def __getstate__(self) -> dict[str, object]:
        """Leave memory maps behind when a worker process gets a copy."""
        return super().__getstate__() | {"_open_views": OrderedDict()}

    def locate(
        self, document_index: int, *, keep: bool = False
    ) -> tuple[NDArray[np.uint8], SampleTensors]:
        """Return a sample's tokens and spans, verified, and where they lie.

        Raises:
            DamagedShardError: its shard or the view's file is missing or has another size.
            DamagedSampleError: a CRC-32 differs, or a header is unusable.
            SchemaVersionError: written by another version of the format.
        """
        known = self._kept.get(document_index)
        if known is not None:
            return known
        sample, (own_ids, *_) = super().locate(document_index, keep=keep)
        seen = self._put_together(document_index, sample, own_ids)
        if keep:
            self._kept[document_index] = seen
            self._num_kept_bytes += seen[0].nbytes
            while self._num_kept_bytes > _MAX_KEPT_BYTES:
                self._num_kept_bytes -= self._kept.popitem(last=False)[1][0].nbytes
        return seen

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch remote shards and their views' files in the background."""
        shards = list(shards)
        super().prefetch(shards)
        if self._cache is not None:
            self._cache.prefetch([self._dataset.view_file(shard_index) for shard_index in shards])

    def _put_together(
        self, document_index: int, sample: NDArray[np.uint8], own_ids: tuple[int, int]
    ) -> tuple[NDArray[np.uint8], SampleTensors]:
        """Return what `fill_segment` reads: the sample's ids, and the view's as uint32."""
        num_student = int(self._table.num_student_tokens[document_index])
        num_teacher = int(self._table.num_teacher_tokens[document_index])
        is_teacher = self._view.side == "teacher"
        num_view, num_own = (num_teacher, num_student) if is_teacher else (num_student, num_teacher)
        payload = self._payload(document_index)
        tiles, *bits = payload[:PAYLOAD_HEADER].tolist()
        counts = (num_view, num_view, 0 if tiles else num_view, num_student, num_student)
        sizes = [(width * count + 7) // 8 for width, count in zip(bits, counts, strict=True)]
        if PAYLOAD_HEADER + sum(sizes) != len(payload):
            raise self.contradiction(
                document_index,
                f"its {len(payload)} bytes in view {self._view.name} are not {counts}",
            )
        start, size = own_ids
        num_own_bytes = -(-num_own * size // _WORD) * _WORD
        words = np.empty(num_own_bytes // _WORD + num_view + 2 * num_student, np.uint32)
        seen = words.view(np.uint8)
        seen[: num_own * size] = sample[start : start + num_own * size]
        ids, advances = num_own_bytes // _WORD, num_own_bytes // _WORD + num_view
        widths = advances + num_student
        unpack(payload, PAYLOAD_HEADER, bits[0], words[ids:advances])
        behind = unpack(payload, PAYLOAD_HEADER + sum(sizes[:3]), bits[3], words[advances:widths])
        unpack(payload, behind, bits[4], words[widths:])
        own, view = (0, size), (ids * _WORD, _WORD)
        spans = (advances * _WORD, _WORD), (widths * _WORD, _WORD)
        return seen, (own, view, *spans) if is_teacher else (view, own, *spans)

    def _payload(self, document_index: int) -> NDArray[np.uint8]:
        shard_index = self.shard_of(document_index)
        place = document_index - self._shard_starts[shard_index]
        opened = self._open_views.get(shard_index)
        if opened is None:
            opened = self._open_views[shard_index] = self._map_view(shard_index)
            if len(self._open_views) > MAX_OPEN_SHARDS:
                self._open_views.popitem(last=False)
        payload = opened.data[opened.starts[place] : opened.starts[place + 1]]
        check_payload(
            payload.data,
            opened.index,
            place,
            name=self._dataset.view_file(shard_index).url,
            where=lambda: f"of {self._where(document_index)}",
            side=self._view.side,
        )
        return payload

    def _map_view(self, shard_index: int) -> _OpenView:
        claim, index = (
            self._dataset.view_file(shard_index),
            self._dataset.read_view_index(shard_index),
        )
        with self._open_view_file(shard_index) as file:
            num_bytes = file.seek(0, 2)
            if num_bytes != claim.num_bytes:
                raise DamagedShardError(
                    f"{claim.url} has {num_bytes} bytes, the manifest says {claim.num_bytes}: "
                    f"{REMEDY}{self._view.side}"
                )
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        require_view_file(data[: len(VIEW_MAGIC)].tobytes(), claim.url, self._view.side)
        return _OpenView(data, index, index.starts)

    def _open_view_file(self, shard_index: int) -> BinaryIO:
        if self._cache is not None:
            return self._cache.open(self._dataset.view_file(shard_index))
        return self._dataset.open_view_file(shard_index)
