"""One process at a time in an output folder on this machine's file systems.

The operating system's lock ends with its process; the file names the owner.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from pipeline.command_line.failures import FULL_DISK, hinted, naming
from pipeline.command_line.links import open_unlinked
from pipeline.command_line.pasted import pasted

NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""Errors of `flock` on file systems without locks."""

logger = logging.getLogger(__name__)


@contextmanager
def hold_folder(path: str, folder: str, *, error: type[ValueError] = ValueError) -> Iterator[None]:
    """Hold a folder's lock at `path`; afterwards remove it, and a folder left empty.

    Raises `error`, naming the owner, if another process holds it.
    """
    parent = os.path.dirname(path)
    is_new = not os.path.isdir(parent)
    file = _open_locked(path, folder, error)
    try:
        with naming(path):
            json.dump(describe_owner(), file)
            file.flush()
        yield
    finally:
        if os.path.exists(path):
            os.remove(path)  # before the lock goes: a later process that opens it finds another
        if is_new:
            with suppress(OSError):  # something was written
                os.rmdir(parent)
        with naming(path):  # unwritten output fails again
            file.close()


def make_local_folder(path: str) -> None:
    """Create a folder.

    NotADirectoryError if a file is in the way, PermissionError if refused, OSError of a full disk.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        above = (path, *map(str, Path(path).parents))
        file = next(name for name in above if os.path.lexists(name))
        refusal = NotADirectoryError(f"{file} is a file, where a folder is to be")
        raise hinted(refusal, f"--output {pasted(f'{file}-2')}") from error
    except OSError as error:  # not this user's, read-only, or not a real file system
        if error.errno in FULL_DISK:
            raise
        raise PermissionError(
            f"{path} can't be made ({error.strerror}): name a folder that you may write to"
        ) from error


def describe_owner() -> dict[str, Any]:
    """Describe this process for a lock."""
    host, process = socket.gethostname(), os.getpid()
    return {"id": uuid.uuid4().hex, "process": process, "host": host, "started": time.time()}


def name_owner(owner: dict[str, Any]) -> str:
    """Return a lock's owner in words, with a final comma."""
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner["started"]))
    return f"process {owner['process']} on {owner['host']}, started {started},"


def describe_refusal(owner: dict[str, Any] | None, folder: str) -> str:
    """Say why a folder can't be written to; None: an unknown owner."""
    who = "another job writes" if owner is None else f"{name_owner(owner)} writes"
    return f"{who} to {folder}; wait until it has ended, or name another folder"


def _open_locked(path: str, folder: str, error: type[ValueError]) -> TextIO:
    while True:
        make_local_folder(os.path.dirname(path))
        try:
            file = open(path, "a+", opener=open_unlinked)  # noqa: SIM115
        except FileNotFoundError:  # its holder has just removed the folder
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refusal = describe_refusal(_read(file), folder)
            file.close()
            raise error(refusal) from None
        except OSError as failure:
            if failure.errno not in NO_LOCKS:
                raise
            logger.warning("%s has no locks: start no other job with this output", folder)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                file.truncate(0)
                return file
        file.close()  # its holder has just removed it


def _read(file: TextIO) -> dict[str, Any] | None:
    file.seek(0)
    try:
        owner: dict[str, Any] = json.load(file)
    except ValueError:  # being written
        return None
    return owner
