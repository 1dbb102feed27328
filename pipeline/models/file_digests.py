"""SHA-256 of large files: read once, then remembered for as long as a file stays as it is.

A teacher's weights are tens of gigabytes, and every worker of a job asks for their hash.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple

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


class _State(NamedTuple):
    """What changes when a file does: its path with links followed, its size, times and place.

    A copy that keeps the time of the last change does not keep that of the inode's.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> _State:
        real = path.resolve()
        found = real.stat()
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(str(real), found.st_size, *times, found.st_ino, found.st_dev)


def _digest(path: Path) -> str:
    return _digest_of_state(_State.of(path))


@lru_cache(maxsize=4096)
def _digest_of_state(state: _State) -> str:
    kept = cache_folder("file-digests") / sha256(json.dumps(state).encode()).hexdigest()
    try:
        text = kept.read_text()
    except (OSError, ValueError):
        text = ""
    if _DIGEST.fullmatch(text):
        return text
    # Whether a later change would show in the times.
    is_settled = max(state.modified_ns, state.changed_ns) < time.time_ns() - _TICK_NS
    with Path(state.path).open("rb", buffering=0) as file:
        digest = file_digest(file, "sha256").hexdigest()
    if is_settled and _State.of(Path(state.path)) == state:
        keep(kept, digest)
    return digest
