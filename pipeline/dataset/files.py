"""A dataset's files, local or remote."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import BinaryIO, cast

import fsspec
import numpy as np
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from pipeline.command_line.git_lfs import POINTER_BYTES, refuse_pointer
from pipeline.dataset.cache import ListedFile
from pipeline.dataset.dataset_reading import (
    folder_of,
    num_bytes_of,
    read_generation,
    read_manifest,
    read_sample,
    read_whole,
)
from schemas.errors import RESTORE, DamagedShardError, DatasetError
from schemas.index import ShardIndex, decode_ids, decode_index
from schemas.manifest import Manifest
from schemas.removed import RemovedDocuments, decode_removed

_SHARDS_AT_ONCE = 16


@dataclass(frozen=True)
class Dataset:
    """A dataset's location, manifest and files, which are checked when read.

    Attributes:
        location: the folder: a path, or a URL that `fsspec` reads.
        fingerprints: of all known generations, later ones included.
    """

    location: str
    manifest: Manifest
    fingerprints: frozenset[str] = frozenset()

    @property
    def is_local(self) -> bool:
        """Whether the files are on a local file system."""
        return isinstance(fsspec.core.url_to_fs(self.location)[0], LocalFileSystem)

    def has_generation(self, fingerprint: str) -> bool:
        """Whether this dataset has, or had, a generation with this fingerprint."""
        return fingerprint in {*self.manifest.fingerprints.values(), *self.fingerprints}

    def at_generation(self, number: int) -> "Dataset":
        """Return the dataset at an earlier generation; DatasetError if that is gone or invalid."""
        manifest = read_generation(self.location, self.manifest, number)
        _require_each_once(manifest, self.location)
        return replace(self, manifest=manifest)

    def shard(self, shard_index: int) -> ListedFile:
        """Return a shard's tar as listed; a local url is a plain path."""
        record = self.manifest.shards[shard_index]
        return ListedFile(self._url(record.file), record.num_bytes, record.sha256)

    def open_shard(self, shard_index: int) -> BinaryIO:
        """Open a shard's tar, unchecked, or raise DamagedShardError."""
        name = self.manifest.shards[shard_index].file
        try:
            return self.open_file(name)
        except FileNotFoundError as error:
            raise DamagedShardError(f"{self._url(name)} is missing: {RESTORE}") from error

    def open_file(self, name: str) -> BinaryIO:
        """Open a file; jobs override this."""
        file = fsspec.open(self._url(name), "rb").open()
        if (getattr(file, "size", None) or POINTER_BYTES) < POINTER_BYTES:
            refuse_pointer(self._url(name), file.read())
            file.seek(0)
        return cast(BinaryIO, file)

    def read_file(self, name: str) -> bytes:
        """Read a small file."""
        return read_whole(self._url(name))

    def samples(
        self,
        shard_index: int,
        index: ShardIndex,
        *,
        documents: Iterable[int] | None = None,
        with_removed: bool = False,
    ) -> Iterator[tuple[int, memoryview]]:
        """Read a shard's samples, each checked against its CRC-32.

        For random access there is `SampleReader` in `pipeline.streaming`.

        Args:
            shard_index: the shard's number.
            index: its index, with names.
            documents: places in the index; None reads all, in order.
            with_removed: include removed documents.

        Yields:
            the sample's place in the index, and its payload.

        Raises:
            DamagedShardError: the tar, or the list of removed documents, is missing or cut.
            DamagedSampleError: a sample was altered.

        Example:
            >>> index = dataset.read_index(0, with_names=True)  # doctest: +SKIP
            >>> [decode_document(sample) for _, sample in dataset.samples(0, index)]
        """
        if not with_removed and len(removed := self.removed_of(shard_index)):
            wanted, gone = range(len(index)) if documents is None else documents, set(removed)
            documents = [place for place in wanted if place not in gone]
        with self.open_shard(shard_index) as file:
            name = self.manifest.shards[shard_index].file
            for place in range(len(index)) if documents is None else documents:
                yield place, read_sample(file, index, place, shard=name)

    def read_index(
        self,
        shard_index: int,
        *,
        with_names: bool = False,
        metadata: Sequence[str] | None = None,
    ) -> ShardIndex:
        """Return a shard's index, removed documents included, verified by its hash.

        Keys, ids and quality are read only `with_names`. A `metadata` of None reads all fields with
        names, and none without. DamagedShardError if it is missing or altered.
        """
        record = self.manifest.shards[shard_index]
        data = self.index_bytes(shard_index)
        index = decode_index(data, with_names=with_names, metadata=metadata)
        if len(index) != record.num_documents:
            raise DamagedShardError(
                f"{self._url(record.index_file)} has {len(index)} documents, the manifest says "
                f"{record.num_documents}: {RESTORE}"
            )
        return index

    def read_ids(self, shard_index: int) -> pa.ChunkedArray:
        """Return the ids of a shard's documents, in order."""
        return decode_ids(self.index_bytes(shard_index))

    def index_bytes(self, shard_index: int) -> bytes:
        """Return a shard's stored index, or raise DamagedShardError."""
        record = self.manifest.shards[shard_index]
        return self._read_named(record.index_file, record.index_sha256, "index")[1]

    def removed_of(self, shard_index: int) -> NDArray[np.int64]:
        """Return removed documents' places in a shard's index, ascending."""
        return self.removed.of_shard(shard_index) if self.removed else np.empty(0, np.int64)

    @property
    def is_whole(self) -> bool:
        """Whether no document was removed."""
        return self.manifest.removed is None

    @cached_property
    def removed(self) -> RemovedDocuments | None:
        """The removed documents, or None. DamagedShardError if their list is missing or altered."""
        record = self.manifest.removed
        if record is None:
            return None
        url, data = self._read_named(record.file, record.sha256, "list")
        removed = decode_removed(data)
        if len(removed) != record.count:
            raise DamagedShardError(
                f"{url} lists {len(removed)} documents, the manifest says {record.count}: {RESTORE}"
            )
        return removed

    def removed_keys(self) -> frozenset[str]:
        """Return the keys of removed documents, for readers of tars or tables.

        Example:
            >>> open_dataset("aligned").removed_keys()  # doctest: +SKIP
            frozenset({'7d865e959b2466918c9863afca942d0f'})
        """
        keys: set[str] = set()
        for shard in range(len(self.manifest.shards)):
            if len(places := self.removed_of(shard)):
                names = self.read_index(shard, with_names=True).key
                keys.update(names[place] for place in places)
        return frozenset(keys)

    def _read_named(self, name: str, sha256: str, what: str) -> tuple[str, bytes]:
        url = self._url(name)
        try:
            data = self.read_file(name)
        except FileNotFoundError as error:
            raise DamagedShardError(f"{url} is missing: {RESTORE}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedShardError(
                f"{url} is not the {what} that the manifest names (SHA-256 differs): {RESTORE}"
            )
        return url, data

    def find_damage(self) -> dict[int, DamagedShardError]:
        """Compare tars' sizes with the manifest; return errors by shard number."""
        errors = self.map_shards(self._compare)
        return {number: error for number, error in enumerate(errors) if error}

    def map_shards[Made](self, work: Callable[[int], Made]) -> Iterator[Made]:
        """Apply a function to shards' numbers, in threads; yield in order."""
        with ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
            yield from pool.map(work, range(len(self.manifest.shards)))

    def _compare(self, shard_index: int) -> DamagedShardError | None:
        claim = self.shard(shard_index)
        try:
            num_bytes = num_bytes_of(claim.url)
        except FileNotFoundError:
            return DamagedShardError(f"{claim.url} is missing: {RESTORE}")
        # A server may hide a file's size; the shard cache then measures it.
        if num_bytes is not None and num_bytes != claim.num_bytes:
            return DamagedShardError(
                f"{claim.url} has {num_bytes} bytes, the manifest says {claim.num_bytes}: {RESTORE}"
            )
        return None

    def _url(self, name: str) -> str:
        return f"{self.location}/{name}"


def open_dataset(path: str | os.PathLike[str], *, generation: int | None = None) -> Dataset:
    """Open a dataset.

    Args:
        path: its folder or its manifest: a path, or a URL that `fsspec` reads.
        generation: an earlier state of the dataset, counted from 0; None: the newest.

    Raises:
        DatasetError: not a finished dataset, no such generation, or a shard is listed twice.
        SchemaVersionError: written by another version of the format.

    Example:
        >>> open_dataset("gs://bucket/aligned").manifest.totals["num_documents"]  # doctest: +SKIP
        1319
    """
    manifest = read_manifest(os.fspath(path))
    location = folder_of(os.fspath(path))
    filesystem, local_path = fsspec.core.url_to_fs(location)
    if isinstance(filesystem, LocalFileSystem):
        location = local_path
    _require_each_once(manifest, os.fspath(path))
    dataset = Dataset(location, manifest, frozenset(manifest.fingerprints.values()))
    return dataset if generation is None else dataset.at_generation(generation)


def _require_each_once(manifest: Manifest, path: str) -> None:
    for name in ("file", "sha256"):
        counts = Counter(getattr(record, name) for record in manifest.shards)
        twice = [value for value, count in counts.items() if count > 1]
        if twice:
            raise DatasetError(
                f"{path}: the manifest lists shard {name} {twice[0]} {counts[twice[0]]} times; its "
                "documents would be read twice: restore the manifest"
            )
