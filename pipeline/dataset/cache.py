"""Remote shards on local disk, shared by a host's processes.

A file is named by its SHA-256; a lock serialises its downloads. The least recently opened are
removed to stay under the limit; POSIX keeps unlinked files while they are open.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

import fsspec
from filelock import FileLock, Timeout

from pipeline.command_line.failures import FULL_DISK
from pipeline.command_line.folder_lock import NO_LOCKS
from schemas.errors import RESTORE, DamagedShardError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_WAIT_SECONDS = 0.05


@dataclass(frozen=True)
class ListedFile:
    """A file in the manifest: its `fsspec` URL, size and SHA-256."""

    url: str
    num_bytes: int
    sha256: str


_Begun = tuple[Future[None], ListedFile]


class ShardCache:
    """A folder of limited size with copies of remote files."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        """Use a local folder; `max_bytes` includes running downloads."""
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pool: tuple[int, SimpleQueue[_Begun]] | None = None

    def open(self, file: ListedFile) -> BinaryIO:
        """Open a file, fetching it first if it isn't cached.

        DamagedShardError if it is missing or altered; ValueError if it exceeds the limit, or the
        folder's file system has no locks; OSError if the disk is full or the remote side fails.
        """
        path = self.folder / file.sha256
        while True:
            try:
                opened = path.open("rb")
            except FileNotFoundError:
                self._fetch(file, path)
                continue
            os.utime(opened.fileno())
            return opened

    def prefetch(self, files: Iterable[ListedFile]) -> list[Future[None]]:
        """Fetch files in the background; failures are logged, and repeat on opening."""
        missing = [file for file in files if not (self.folder / file.sha256).exists()]
        waiting, begun = self._waiting(), [(Future[None](), file) for file in missing]
        for each in begun:
            waiting.put(each)
        return [future for future, _ in begun]

    def _waiting(self) -> "SimpleQueue[_Begun]":
        # Threads don't survive a fork, so each process makes its own. An ending process doesn't
        # wait for daemons; the next removes what they leave.
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = (os.getpid(), SimpleQueue())
            for _ in range(2):
                work = Thread(target=self._work, args=self._pool[1:], name="shard-prefetch")
                work.daemon = True
                work.start()
        return self._pool[1]

    def _work(self, waiting: "SimpleQueue[_Begun]") -> None:
        while True:
            future, file = waiting.get()
            self._fetch_quietly(file)
            future.set_result(None)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_pool": None}

    def _fetch_quietly(self, file: ListedFile) -> None:
        try:
            self._fetch(file, self.folder / file.sha256)
        except Exception as error:  # whatever a file system raises; `open` raises it again
            logger.warning("prefetch of %s failed: %s", file.url, error)

    def _fetch(self, file: ListedFile, path: Path) -> None:
        if file.num_bytes > self.max_bytes:
            raise ValueError(
                f"{file.url} has {file.num_bytes} bytes, the shard cache {self.folder} is limited "
                f"to {self.max_bytes}: raise the limit to several shards"
            )
        with self._locked(path.with_suffix(".lock")):
            if path.exists():
                return
            part = path.with_suffix(".part")
            while not self._reserve(part, file.num_bytes):
                time.sleep(_WAIT_SECONDS)
            try:
                self._download(file, part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)

    def _download(self, file: ListedFile, part: Path) -> None:
        """Retry once: the transfer may be at fault."""
        for _ in range(2):
            digest, num_bytes = hashlib.sha256(), 0
            try:
                with part.open("r+b") as sink:
                    for chunk in _chunks(file):
                        digest.update(chunk)
                        num_bytes += sink.write(chunk)
                    sink.truncate(num_bytes)
            except OSError as error:
                if error.errno in FULL_DISK:
                    error.filename = str(part)
                    error.add_note(
                        f"the shard cache {self.folder} needs {file.num_bytes} bytes more, and is "
                        f"below its limit of {self.max_bytes}: lower cache_bytes, or choose "
                        "another cache_folder (of vocag train, set HOME)"
                    )
                raise
            if num_bytes == file.num_bytes and digest.hexdigest() == file.sha256:
                return
        raise DamagedShardError(
            f"{file.url} has {num_bytes} bytes and SHA-256 {digest.hexdigest()[:16]}…, the "
            f"manifest says {file.num_bytes} and {file.sha256[:16]}…: {RESTORE}"
        )

    def _reserve(self, part: Path, num_bytes: int) -> bool:
        """Claim room; False while other downloads hold it."""
        with self._locked(self.folder / "cache.lock"):
            part.unlink(missing_ok=True)
            self._remove_abandoned()
            files = list(self._files())
            excess = sum(stat.st_size for _, stat in files) + num_bytes - self.max_bytes
            done = [(stat.st_mtime_ns, path, stat) for path, stat in files if not path.suffix]
            for _, path, stat in sorted(done, key=lambda entry: entry[0]):
                if excess <= 0:
                    break
                path.unlink()
                excess -= stat.st_size
            if excess > 0:
                return False
            with part.open("wb") as sink:
                sink.truncate(num_bytes)
            return True

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        lock = FileLock(path)
        try:
            lock.acquire()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise ValueError(
                f"the shard cache {self.folder} is on a file system without locks "
                f"({error.strerror}): choose another cache_folder (of vocag train, set HOME)"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _remove_abandoned(self) -> None:
        """Remove unlocked downloads: their processes are gone."""
        for part in self.folder.glob("*.part"):
            lock = FileLock(part.with_suffix(".lock"), timeout=0)
            try:
                with lock:
                    part.unlink(missing_ok=True)
            except Timeout:
                continue

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.iterdir():
            if path.suffix in ("", ".part"):
                # A download may end, and so be renamed, at any moment.
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.stat()


def _chunks(file: ListedFile) -> Iterator[bytes]:
    try:
        with fsspec.open(file.url, "rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except FileNotFoundError as error:
        raise DamagedShardError(f"{file.url} is missing: {RESTORE}") from error
