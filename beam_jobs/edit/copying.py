"""Copy a file, or parts of it, and know by SHA-256 what was read and what was written."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import BinaryIO

from pipeline.dataset.cache import ListedFile
from schemas.errors import DamagedShardError

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Copied:
    """What was read and what was written.

    Attributes:
        source_sha256: 64 hex digits of the whole source, its left out parts too.
        sha256: 64 hex digits of the copy.
        num_bytes: the copy's size.
    """

    source_sha256: str
    sha256: str
    num_bytes: int


def copy_parts(source: BinaryIO, sink: BinaryIO, parts: Iterable[tuple[int, bool]]) -> Copied:
    """Copy some of a file's parts, and read it to its end.

    Args:
        source: opened for reading, at its start.
        sink: where the copy goes; it stays open.
        parts: bytes of each part, one behind another from the start, and whether it is copied.

    Example:
        >>> copy_parts(io.BytesIO(b"abcdef"), sink, [(2, True), (1, False), (3, True)]).num_bytes
        5
    """
    read, written, num_bytes = sha256(), sha256(), 0
    for size, is_kept in parts:
        while size and (chunk := source.read(min(size, _CHUNK_BYTES))):
            size -= len(chunk)
            read.update(chunk)
            if is_kept:
                written.update(chunk)
                num_bytes += len(chunk)
                sink.write(chunk)
    while chunk := source.read(_CHUNK_BYTES):
        read.update(chunk)
    return Copied(read.hexdigest(), written.hexdigest(), num_bytes)


def require_same(sha256_hex: str, file: ListedFile, what: str) -> None:
    """Check that what was read is what the manifest names.

    Raises:
        DamagedShardError: it is not.
    """
    if sha256_hex != file.sha256:
        raise DamagedShardError(
            f"{file.url} is not the {what} that the manifest names (SHA-256 differs): restore it"
        )
