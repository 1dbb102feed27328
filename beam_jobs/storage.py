"""Files of a dataset, local or in an object store.

Local files go through `os`: fast, with atomic renames. Anything with a scheme goes through Beam's
FileSystems, where an object appears whole when closed. Only stores import Beam: it takes two
seconds.
"""

import errno
import glob
import io
import os
import re
import shutil
import uuid
from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import batched
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.command_line.failures import naming
from pipeline.command_line.folder_lock import make_local_folder
from pipeline.command_line.git_lfs import refuse_pointer
from pipeline.command_line.links import open_unlinked
from pipeline.remote import first_contact

if TYPE_CHECKING:
    from apache_beam.io.filesystems import FileSystems

_BUFFER_BYTES = 1 << 20
_NOT_FOUND = 404
_STORE_THREADS = 16
_OBJECTS_AT_ONCE = 100
"""Deleted by one call: Beam makes a client for each, in 0.1 s for Amazon's store."""
_AS_STORED = "uncompressed"
"""Beam's `CompressionTypes.UNCOMPRESSED`."""

_SCHEME = re.compile(r"([a-zA-Z][-a-zA-Z0-9+.]*)://")
"""As Beam recognises it."""

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS}


def is_local(path: str) -> bool:
    """Whether a path is local or on a mounted file system.

    Example:
        >>> is_local("gs://bucket/out")
        False
    """
    return _SCHEME.match(path) is None


def absolute(path: str) -> str:
    """Make a local path absolute, for every worker; ~ is the user's folder, as for readers."""
    path = path.removeprefix("file://")
    return os.path.abspath(os.path.expanduser(path)) if is_local(path) else path.rstrip("/")


def join(folder: str, *names: str) -> str:
    """Path of a file below a folder."""
    return os.path.join(folder, *names) if is_local(folder) else _stores().join(folder, *names)


def require_answer(path: str) -> None:
    """Raise NoAnswerError if a path's store is silent for seconds."""
    first_contact.require_answer(path, look_at=_look_at)


def make_folder(path: str) -> None:
    """Create a local folder; object stores have none.

    NotADirectoryError if a file is in the way, PermissionError if refused.
    """
    if is_local(path):
        make_local_folder(path)


def open_to_read(path: str, *, buffer_bytes: int = _BUFFER_BYTES) -> BinaryIO:
    """Open a file's stored bytes; FileNotFoundError if missing."""
    if is_local(path):
        return open(path, "rb", buffering=buffer_bytes)
    try:
        file: BinaryIO = _stores().open(path, compression_type=_AS_STORED)
    except Exception as error:  # each store's client has types of its own
        if getattr(error, "code", None) != _NOT_FOUND:
            raise
        raise FileNotFoundError(errno.ENOENT, "no such object", path) from error
    return file


def open_to_write(path: str) -> BinaryIO:
    """Open a new file; LinkError if a link is in its place."""
    if is_local(path):
        return open(path, "wb", buffering=_BUFFER_BYTES, opener=open_unlinked)
    file: BinaryIO = _stores().create(path, compression_type=_AS_STORED)
    return _S3Writer(file) if path.startswith("s3://") else file


def open_shard_to_write(path: str) -> BinaryIO:
    """Open a new file, as `open_to_write`, outside the page cache.

    Shards are read much later. This saves a fifth of a worker's CPU time on virtual machines that
    return free memory.
    """
    if is_local(path) and hasattr(os, "posix_fadvise"):
        return io.BufferedWriter(_UncachedFile(path, "wb", opener=open_unlinked), _BUFFER_BYTES)
    return open_to_write(path)


def read_bytes(path: str) -> bytes:
    """Read a file; FileNotFoundError if missing, PointerError for a Git LFS pointer."""
    with open_to_read(path) as file:
        data = file.read()
    refuse_pointer(path, data)
    return data


def write_atomically(path: str, data: bytes, *, scratch: str) -> None:
    """Replace a file: readers see the old or the new one, whole.

    `scratch`, on the same file system, holds incomplete local files.
    """
    target = path if not is_local(path) else join(scratch, f"{uuid.uuid4().hex}.partial")
    with naming(path), open_to_write(target) as file:
        file.write(data)
    if target != path:
        os.replace(target, path)


def num_bytes_of(path: str) -> int | None:
    """A file's size in bytes, None if it doesn't exist."""
    if is_local(path):
        return os.path.getsize(path) if os.path.isfile(path) else None
    if not _stores().exists(path):
        return None
    return int(_stores().get_filesystem(path).metadata(path).size_in_bytes)


def publish(temporary: str, final: str, num_bytes: int, *, scratch: str) -> None:
    """Give a finished temporary file its final name.

    This can be repeated, also by two workers at once: `final` is never missing again or cut.
    FileNotFoundError if neither file has `num_bytes`.
    """
    if num_bytes_of(temporary) != num_bytes:
        if num_bytes_of(final) != num_bytes:
            raise FileNotFoundError(
                f"neither {temporary} nor {final} holds the {num_bytes} bytes that were written: "
                "another process removed them; run the same command again"
            )
    elif is_local(final):
        _link(temporary, final, scratch)
    else:
        _copy_object(temporary, final)


def list_folder(folder: str) -> Mapping[str, int]:
    """Bytes of the files directly in a folder, by name."""
    if not is_local(folder):
        pattern = join(glob.escape(folder), "*")
        found = _stores().match([pattern])[0].metadata_list
        return {_stores().split(m.path)[1]: m.size_in_bytes for m in found}
    if not os.path.isdir(folder):
        return {}
    sizes = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # just removed, such as another job's lock
            if entry.is_file():
                sizes[entry.name] = entry.stat().st_size
    return sizes


def list_folders(folder: str, prefix: str) -> list[str]:
    """Paths of a folder's folders by a prefix of their names; a store has none without files."""
    pattern = join(glob.escape(folder), f"{prefix}*")
    if is_local(folder):
        return sorted(glob.glob(pattern))
    found = _stores().match([join(pattern, "*")])[0].metadata_list
    return sorted({_stores().split(m.path)[0] for m in found})


def delete_files(folder: str, names: Iterable[str]) -> None:
    """Delete a folder's files, if they exist; OSError if one stays."""
    paths = [join(folder, name) for name in names]
    if is_local(folder):
        for path in paths:
            with _unless_gone(path):
                os.remove(path)
    else:
        with ThreadPoolExecutor(_STORE_THREADS) as pool:
            list(pool.map(_delete_objects, batched(paths, _OBJECTS_AT_ONCE)))


def remove_folder(folder: str) -> None:
    """Remove a folder and its files."""
    if is_local(folder):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        delete_files(folder, list_folder(folder))


def _stores() -> "type[FileSystems]":
    from apache_beam.io.filesystems import FileSystems

    return FileSystems


def _look_at(path: str) -> None:
    from apache_beam.io.filesystem import BeamIOError

    with suppress(BeamIOError):  # an answer; the next call will interpret it
        _stores().exists(path)


def _delete_objects(paths: Sequence[str]) -> None:
    # Beam's client of Google's store (2.77) takes a path for a pattern here, no other one does.
    is_pattern = paths[0].startswith("gs://")
    with _unless_gone(*paths):
        _stores().delete([glob.escape(path) if is_pattern else path for path in paths])


@contextmanager
def _unless_gone(*paths: str) -> Iterator[None]:
    try:
        yield
    except OSError:  # Beam's BeamIOError is one; only a file that stays is a failure
        if any(num_bytes_of(path) is not None for path in paths):
            raise


def _copy_object(source: str, destination: str) -> None:
    # Google's client raises. Beam's for S3 (2.77) returns the error of each pair.
    for *_, error in _stores().copy([source], [destination]) or ():
        if error is not None:
            raise OSError(f"{source} could not be copied to {destination}: {error}") from error


class _S3Writer(io.BufferedWriter):
    """A new S3 object, written whole or not at all, even if empty.

    Beam's client (2.77) completes failed uploads, and empty ones, which S3 refuses.
    """

    def __init__(self, file: Any) -> None:
        stream: Any = file.detach()
        self._upload = stream._uploader
        super().__init__(stream, _BUFFER_BYTES)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._upload.last_error = error  # raised in place of completing it
        super().__exit__(kind, error, trace)

    def close(self) -> None:
        if not self.closed and not self.tell() and self._upload.last_error is None:
            self._upload._write_to_s3(b"")
        super().close()


class _UncachedFile(io.FileIO):
    # typeshed takes FileIO for an IO[bytes] as well, whose `write` never returns None
    def write(self, data: Buffer, /) -> int | None:  # type: ignore[override]
        written = super().write(data)
        with suppress(OSError):  # only advice: the bytes are the same if a file system ignores it
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return written


def _link(temporary: str, final: str, scratch: str) -> None:
    linked = join(scratch, f"{uuid.uuid4().hex}.linked")
    try:
        os.link(temporary, linked)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.replace(temporary, final)  # a file system without hard links
        return
    os.replace(linked, final)
    if os.path.exists(linked):  # POSIX: renaming one link of a file onto another does nothing
        os.remove(linked)
