"""What a job needs of the machine, checked before it starts, and named when it has run out."""

import logging
import os
import re
import resource
import shutil

from beam_jobs import storage
from beam_jobs.blocks import Shuffle
from beam_jobs.options import AlignOptions, OptionsError
from beam_jobs.pieces import SAMPLE_BYTES_PER_TEXT_BYTE
from pipeline.formatting import format_bytes

LEAST_ADDRESS_SPACE = 1500 << 20
"""Python, Beam and two tokenizers don't load with less, though they touch a third of it."""

BASE_MEMORY = 850 * 10**6
"""Python, Beam, two tokenizers, their memory of words, and the batches under way."""

_FULL = re.compile(r"\[Errno (?:28|122)\] [^:\n]*(?:: '([^'\n]+)')?")
_TOO_LARGE = re.compile(r"\[Errno 27\]")
_NO_MEMORY = re.compile(
    r"MemoryError|memory allocation of \d+ bytes failed|Cannot allocate memory|"
    r"can't start new thread|Not enough memory"
)

_logger = logging.getLogger(__name__)


def choose_shuffle(options: AlignOptions) -> Shuffle:
    """Return how texts travel: through files wherever workers share a file system."""
    if options.shuffle != "auto":
        return options.shuffle
    return "files" if storage.is_local(options.output) else "runner"


def estimate_memory(shard_bytes: int, *, keep_text: bool) -> int:
    """Return about how many bytes of memory a process of the job has at most, mapped files too.

    Example:
        >>> estimate_memory(256 << 20, keep_text=False) // 10**6
        1118
    """
    bucket = shard_bytes // (SAMPLE_BYTES_PER_TEXT_BYTE + keep_text)
    return BASE_MEMORY + 3 * bucket


def estimate_disk(text_bytes: int, *, keep_text: bool, shuffle: Shuffle) -> int:
    """Return about how many bytes a job has on its output's disk at most, in its last minutes.

    The shards are written once and only renamed in the end; with `shuffle="files"` the texts, in
    blocks, stand beside them until then.

    Example:
        >>> estimate_disk(10**9, keep_text=False, shuffle="files")
        4000000000
    """
    return text_bytes * (SAMPLE_BYTES_PER_TEXT_BYTE + keep_text + (shuffle == "files"))


def require_disk(output: str, run_folder: str, need: int) -> None:
    """Check that a local output's disk has room for a job, counting what an earlier attempt wrote.

    Raises:
        OptionsError: it has less than half; the estimate can't be that wrong.
    """
    if not storage.is_local(output):
        return
    room = free_bytes(output) + sum(storage.list_folder(run_folder).values())
    message = (
        f"--output {output} has {format_bytes(room)} of free disk, and the job will need about "
        f"{format_bytes(need)} there while it runs"
    )
    if room < need / 2:
        raise OptionsError(f"{message}; free some, or choose another --output")
    if room < need:
        _logger.warning("%s; it may run out of space", message)


def require_address_space() -> None:
    """Check that `ulimit -v` lets the libraries load; some of them end the process where not.

    Raises:
        OptionsError: it does not.
    """
    limit = _address_space()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        raise OptionsError(
            f"ulimit -v allows {format_bytes(limit)} of address space, and the job needs "
            f"{format_bytes(LEAST_ADDRESS_SPACE)} in each process: raise it (memory that is "
            "reserved and never touched counts, too)"
        )


def free_bytes(folder: str) -> int:
    """Return the free bytes of the disk that a local folder is on, or would be."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def explain_shortage(text: str, folder: str, need: int | None = None) -> str | None:
    """Return in a sentence what a failure was short of, None where it was nothing of the kind.

    Args:
        text: the failure's message, traceback or log.
        folder: the job's local output.
        need: about how many bytes of disk the job needs there.
    """
    full = _FULL.search(text)
    if full:
        needs = f", and the whole job needs about {format_bytes(need)}" if need else ""
        where = full[1] or folder
        return (
            f"the disk is full: {where} could not be written, {format_bytes(free_bytes(folder))} "
            f"are free{needs}; free some space"
        )
    if _TOO_LARGE.search(text):
        return f"a file in {folder} would exceed the size that ulimit -f allows; raise it"
    if _NO_MEMORY.search(text):
        limit = _address_space()
        limited = f" (ulimit -v allows {format_bytes(limit)} a process)" if limit else ""
        return f"memory ran out{limited}; use fewer --workers or a smaller --shard-bytes"
    return None


def _address_space() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit
