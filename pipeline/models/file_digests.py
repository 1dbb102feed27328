"""SHA-256 of large files: read once, then remembered for as long as a file stays as it is.

A teacher's weights are tens of gigabytes, and every worker of a job asks for their hash.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path

from pipeline.remote.user_cache import cache_folder, keep

_DIGEST = re.compile(r"[0-9a-f]{64}")
# A file written twice within a tick of its disk's clock (2 s on FAT) shows one time for both.
_TICK_NS = 2_000_000_000


def digest_of_files(files: Sequence[Path]) -> str:
    """Return 64 hex digits over names and contents of files, in their order.

    Files are read in threads, for hashing releases the interpreter's lock; one that was read
    before and has not changed since is not read again. The digests are kept in the user's cache
    folder (`$XDG_CACHE_HOME/vocag/file-digests`), by path, size, times and inode.

    Args:
        files: whose names are part of the digest, and whose folders are not.

    Raises:
        OSError: one can't be read.

    Example:
        >>> digest_of_files([Path("teacher/model.safetensors")])[:8]  # doctest: +SKIP
        '5fca52b1'
    """
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
    content = [[path.name, digest] for path, digest in zip(files, digests, strict=True)]
    return sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class _State:
    """What changes when a file does.

    Attributes:
        path: links followed.
        size: bytes.
        modified: nanoseconds since 1970.
        changed: likewise, by the system's own clock: a copy that keeps a time does not keep this.
        inode: of the file.
        device: of the disk.
    """

    path: str
    size: int
    modified: int
    changed: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> _State:
        real = path.resolve()
        found = real.stat()
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(str(real), found.st_size, *times, found.st_ino, found.st_dev)

    @property
    def cache_file(self) -> Path:
        name = sha256(json.dumps(astuple(self)).encode()).hexdigest()
        return cache_folder("file-digests") / name

    def is_settled(self, now: int) -> bool:
        """Whether a later change would show in the times."""
        return max(self.modified, self.changed) < now - _TICK_NS


def _digest(path: Path) -> str:
    return _digest_of_state(_State.of(path))


@lru_cache(maxsize=4096)
def _digest_of_state(state: _State) -> str:
    kept = _read(state.cache_file)
    if kept is not None:
        return kept
    settled = state.is_settled(time.time_ns())
    with Path(state.path).open("rb", buffering=0) as file:
        digest = file_digest(file, "sha256").hexdigest()
    if settled and _State.of(Path(state.path)) == state:
        keep(state.cache_file, digest)
    return digest


def _read(path: Path) -> str | None:
    """Return a digest that was kept, None where there is none or what is there is no digest."""
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return None
    return text if _DIGEST.fullmatch(text) else None
