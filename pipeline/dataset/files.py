"""The files of a dataset, local or remote, as its manifest names them."""

import hashlib
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.dataset.cache import ListedFile
from pipeline.dataset.reading import read_manifest
from schemas.errors import DamagedShardError, DatasetError
from schemas.index import ShardIndex, decode_index
from schemas.manifest import MANIFEST_FILE, Manifest

_REMEDY = "restore it or run beam_jobs.align again"
_CHUNK_BYTES = 4 << 20
_CHECKS_AT_ONCE = 16


@dataclass(frozen=True)
class Dataset:
    """Reads the files of one dataset.

    Attributes:
        location: the folder: a path, or a URL that `fsspec` reads.
        manifest: what it holds.
    """

    location: str
    manifest: Manifest

    @property
    def is_local(self) -> bool:
        """Whether the files lie on a file system of this machine."""
        return isinstance(fsspec.core.url_to_fs(self.location)[0], LocalFileSystem)

    def shard(self, shard: int) -> ListedFile:
        """Return a shard's tar as the manifest describes it; a local url is a plain path."""
        record = self.manifest.shards[shard]
        return ListedFile(self._url(record.file), record.num_bytes, record.sha256)

    def read_index(self, shard: int, *, with_names: bool = False) -> ShardIndex:
        """Return a shard's index, verified by its hash.

        Raises:
            DamagedShardError: the index is missing or is not the manifest's.
        """
        record = self.manifest.shards[shard]
        url = self._url(record.index_file)
        try:
            with fsspec.open(url, "rb") as file:
                data: bytes = file.read()
        except FileNotFoundError as error:
            raise DamagedShardError(f"{url} is missing: {_REMEDY}") from error
        if hashlib.sha256(data).hexdigest() != record.index_sha256:
            raise DamagedShardError(
                f"{url} is not the index that the manifest names (SHA-256 differs): {_REMEDY}"
            )
        index = decode_index(data, with_names=with_names)
        if len(index) != record.num_documents:
            raise DamagedShardError(
                f"{url} has {len(index)} documents, the manifest says {record.num_documents}: "
                f"{_REMEDY}"
            )
        return index

    def find_damage(self, *, hashes: bool = False) -> dict[int, DamagedShardError]:
        """Compare every tar with the manifest; return what is wrong by shard number.

        Args:
            hashes: read every byte and compare SHA-256 too, not only sizes.

        Example:
            >>> open_dataset("OUTPUT").find_damage(hashes=True)  # doctest: +SKIP
            {}
        """
        numbers = range(len(self.manifest.shards))
        with ThreadPoolExecutor(_CHECKS_AT_ONCE) as pool:
            errors = pool.map(lambda shard: self._compare(shard, hashes), numbers)
            return {shard: error for shard, error in zip(numbers, errors, strict=True) if error}

    def _compare(self, shard: int, hashes: bool) -> DamagedShardError | None:
        claim = self.shard(shard)
        filesystem, path = fsspec.core.url_to_fs(claim.url)
        try:
            num_bytes = filesystem.size(path)
        except FileNotFoundError:
            return DamagedShardError(f"{claim.url} is missing: {_REMEDY}")
        # A server may not say how long a file is; the shard cache then measures it.
        if num_bytes is not None and num_bytes != claim.num_bytes:
            return DamagedShardError(
                f"{claim.url} has {num_bytes} bytes, the manifest says {claim.num_bytes}: {_REMEDY}"
            )
        if hashes:
            digest = hashlib.sha256()
            with filesystem.open(path, "rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
            if digest.hexdigest() != claim.sha256:
                return DamagedShardError(
                    f"{claim.url} is not the shard that the manifest names (SHA-256 differs): "
                    f"{_REMEDY}"
                )
        return None

    def _url(self, name: str) -> str:
        return f"{self.location}/{name}"


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Return the files of a dataset.

    Args:
        path: its folder or its manifest: a path, or a URL that `fsspec` reads.

    Raises:
        DatasetError: no finished dataset, or a shard is listed twice.
        SchemaVersionError: written by another version of the format.

    Example:
        >>> open_dataset("gs://bucket/OUTPUT").manifest.totals["num_documents"]  # doctest: +SKIP
        1319
    """
    manifest = read_manifest(os.fspath(path))
    location = os.fspath(path).removesuffix(MANIFEST_FILE).rstrip("/")
    filesystem, local_path = fsspec.core.url_to_fs(location)
    if isinstance(filesystem, LocalFileSystem):
        location = local_path
    for name in ("file", "sha256"):
        counts = Counter(getattr(record, name) for record in manifest.shards)
        twice = [value for value, count in counts.items() if count > 1]
        if twice:
            raise DatasetError(
                f"{path}: the manifest lists shard {name} {twice[0]} {counts[twice[0]]} times; its "
                "documents would be read twice: restore the manifest"
            )
    return Dataset(location, manifest)
