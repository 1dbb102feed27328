"""One job at a time in one output folder.

On a file system the operating system holds the lock, and it ends with the process that has it. An
object store has no locks: there an object says which job writes, is renewed while it does, and
expires once it has not been renewed for a while, or at once if this machine can see that its
process has ended. If two jobs start within the same second, the one that wrote last wins; nothing
that Beam's file systems offer is stricter.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from beam_jobs import storage
from beam_jobs.errors import OptionsError

OUTPUT_LOCK = ".align-lock"
"""The lock's name in a dataset's folder; it is gone when the job is."""

RENEW_SECONDS = 15.0
STALE_SECONDS = 120.0
_SETTLE_SECONDS = 2.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}

logger = logging.getLogger(__name__)


def hold_lock(path: str, folder: str) -> AbstractContextManager[None]:
    """Hold a lock that guards a folder, or raise OptionsError, which names the job that has it."""
    return (_hold_local if storage.is_local(path) else hold_remote)(path, folder)


@contextmanager
def hold_remote(path: str, folder: str) -> Iterator[None]:
    """Hold a lock that is an object; see `hold_lock`."""
    owner = _describe_owner()
    _require_free(path, folder)
    _write(path, owner)
    time.sleep(_SETTLE_SECONDS)  # long enough for another job that saw no lock to write its own
    other = _read(path)
    if other is None or other["id"] != owner["id"]:  # None: whose job ended has just deleted it
        raise OptionsError(_refuse(other, folder))
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(path, owner, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if (_read(path) or owner)["id"] == owner["id"]:
            storage.delete_files(os.path.dirname(path), [os.path.basename(path)])


@contextmanager
def _hold_local(path: str, folder: str) -> Iterator[None]:
    parent = os.path.dirname(path)
    is_new = not os.path.isdir(parent)
    storage.make_folder(parent)
    file = _open_locked(path, folder)
    try:
        json.dump(_describe_owner(), file)
        file.flush()
        yield
    finally:
        if os.path.exists(path):
            os.remove(path)  # before the lock goes: a later job that opens it finds another file
        if is_new:
            with suppress(OSError):  # something was written
                os.rmdir(parent)
        file.close()


def _open_locked(path: str, folder: str) -> TextIO:
    while True:
        file = open(path, "a+")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = _read(path)
            file.close()
            raise OptionsError(_refuse(other, folder)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s has no locks: start no other job with this output", folder)
        if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            file.truncate(0)
            return file
        file.close()  # its holder has just removed it


def _require_free(path: str, folder: str) -> None:
    other = _read(path)
    if other is None:
        return
    if _has_ended(other):
        logger.warning("%s has ended without giving %s back: it is taken over", _who(other), path)
        return
    left = other["renewed"] + STALE_SECONDS - time.time()
    if left > 0:
        raise OptionsError(
            f"{_refuse(other, folder)}; if that job was killed, this command works "
            f"{min(left, STALE_SECONDS):.0f} s from now, or once {path} is deleted"
        )


def _renew(path: str, owner: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(RENEW_SECONDS):
        try:
            other = _read(path)
            if other is not None and other["id"] != owner["id"]:
                logger.warning("%s took over %s; stop one of the two jobs", _who(other), path)
                return
            _write(path, owner)
        except Exception as error:  # each store's client has types of its own
            logger.warning("%s could not be renewed; trying again: %s", path, error)


def _refuse(other: dict[str, Any] | None, folder: str) -> str:
    who = "another job writes" if other is None else f"{_who(other)} writes"
    return f"{who} to --output {folder}; wait until it has ended, or choose another --output"


def _who(owner: dict[str, Any]) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner["started"]))
    return f"process {owner['process']} on {owner['host']}, started {started},"


def _describe_owner() -> dict[str, Any]:
    host, process = socket.gethostname(), os.getpid()
    told = {"id": uuid.uuid4().hex, "process": process, "host": host, "started": time.time()}
    return {**told, "seen": _see(process)}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Return whether a lock's process is known to be gone; one that can't be seen is not."""
    then, now = owner.get("seen"), _see(owner["process"])
    return bool(then and now and then[:2] == now[:2] and then != now)


def _see(process: int) -> list[str] | None:
    """Return the boot of a machine, the container there, and when a process started, in ticks.

    Hosts share names and processes share numbers, but not these. No ticks ("") if it has ended,
    even if its parent hasn't noticed; None if it can't be seen: another user's, or not on Linux.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = [boot, os.readlink("/proc/self/ns/pid")]
        with suppress(ProcessLookupError):
            os.kill(process, 0)
            # Behind the program's name, which may hold anything: state, …, start time.
            told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            return [*place, "" if told[0] in "ZX" else told[19]]
        return [*place, ""]
    return None


def _read(path: str) -> dict[str, Any] | None:
    """Return a lock's owner; None if there is no lock, or none that says whose it is."""
    try:
        if storage.num_bytes_of(path) is None:
            return None
        owner = json.loads(storage.read_bytes(path))
    except (ValueError, OSError):  # being written or removed
        return None
    return {"renewed": owner["started"], **owner}


def _write(path: str, owner: dict[str, Any]) -> None:
    with storage.open_to_write(path) as file:
        file.write(json.dumps({**owner, "renewed": time.time()}).encode())
