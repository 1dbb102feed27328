"""Explain a lack of disk or memory."""

import logging
import os
import re
import resource
import shutil
import tempfile

from beam_jobs import storage
from beam_jobs.job_errors import OptionsError
from pipeline.drawing.formatting import format_bytes

_FULL = re.compile(r"\[Errno (?:28|122)\] [^:\n]*(?:: '([^'\n]+)')?")
_TOO_LARGE = re.compile(r"\[Errno 27\]")
_NO_MEMORY = re.compile(
    r"MemoryError|memory allocation of \d+ bytes failed|Cannot allocate memory|"
    r"can't start new thread|Not enough memory"
)
# Allocations outside torch's own, such as a second process's first, are told by CUDA.
_NO_GPU_MEMORY = re.compile(r"CUDA (error: )?out of memory|CU\w+_STATUS_ALLOC_FAILED")

logger = logging.getLogger(__name__)


def free_bytes(folder: str) -> int:
    """Free disk bytes for a folder, which need not exist."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def describe_room(folder: str, need: float) -> str:
    """Free space of a local disk; "" for a store."""
    if not storage.is_local(folder):
        return ""
    room = free_bytes(folder)
    small = "; WARNING: that is too little" if room < need else ""
    return f"; {format_bytes(room)} are free at {folder}{small}"


def require_disk(folder: str, need: int, *, earlier: str = "") -> None:
    """Check that a local folder's disk has room for a job's output.

    Files in `earlier`, an earlier attempt's folder, count as free. Since `need` is estimated, a
    lack is a warning, less than half an OptionsError.
    """
    if not storage.is_local(folder):
        return
    room = free_bytes(folder) + sum(storage.list_folder(earlier).values() if earlier else ())
    told = (
        f"{folder} has {format_bytes(room)} of free disk, and the job will need about "
        f"{format_bytes(need)} there"
    )
    if 2 * room < need:
        raise OptionsError(f"{told}; free some, or use a larger disk")
    if room < need:
        logger.warning("%s; it may run out of space", told)


def explain_shortage(text: str, folder: str, need: int | None = None) -> str | None:
    """What a failure was short of, or None."""
    found = _FULL.search(text)
    if found:
        # Without a path in the error: the fuller of the two disks that are written to.
        temporary = tempfile.gettempdir()
        where = found[1] or min(folder, temporary, key=free_bytes)
        is_temporary = _is_in(temporary, where) and not _is_in(temporary, folder)
        needs = f", and the whole job needs about {format_bytes(need)}" if need else ""
        full = f"the disk is full: {where} could not be written, {format_bytes(free_bytes(where))}"
        if is_temporary:
            return f"{full} are free; free some space, or let TMPDIR name a folder on another disk"
        return f"{full} are free{needs}; free some space"
    if _TOO_LARGE.search(text):
        return f"a file in {folder} would exceed the size that ulimit -f allows; raise it"
    if _NO_GPU_MEMORY.search(text):
        return "the GPU's memory ran out; use a smaller --batch-tokens or fewer --workers"
    if _NO_MEMORY.search(text):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        allowed = f" (ulimit -v allows {format_bytes(limit)} a process)"
        limited = "" if limit == resource.RLIM_INFINITY else allowed
        smaller = "fewer --workers, or smaller shards (vocag align --shard-bytes)"
        return f"memory ran out{limited}; use {smaller}"
    return None


def _is_in(folder: str, path: str) -> bool:
    return f"{os.path.abspath(path)}/".startswith(f"{os.path.abspath(folder)}/")
