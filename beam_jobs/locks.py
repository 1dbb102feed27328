"""One job at a time in an output folder.

A local lock ends with its process. In an object store, an object names the job, which renews it. It
expires without renewal, or at once if this machine sees that its process has ended. Clocks differ,
so one that looks expired is watched before it is taken over. If two jobs start within a second, the
last writer wins: Beam's file systems offer nothing stricter.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from beam_jobs import storage
from beam_jobs.job_errors import OptionsError
from pipeline.command_line.folder_lock import (
    describe_owner,
    describe_refusal,
    hold_folder,
    name_owner,
)
from pipeline.command_line.links import refuse_linked_folders

OUTPUT_LOCK = ".align-lock"
"""In a dataset's folder while a job works there."""

RENEW_SECONDS = 15.0
STALE_SECONDS = 120.0
_SETTLE_SECONDS = 2.0

logger = logging.getLogger(__name__)


def hold_lock(path: str, folder: str) -> AbstractContextManager[None]:
    """Hold a folder's lock; OptionsError names the job that has it.

    LinkError if the folder has links where a job would write.
    """
    if storage.is_local(folder):
        refuse_linked_folders(folder)
    if storage.is_local(path):
        return hold_folder(path, folder, error=OptionsError)
    return hold_remote(path, folder)


@contextmanager
def hold_remote(path: str, folder: str) -> Iterator[None]:
    """`hold_lock` in an object store."""
    owner = {**describe_owner(), "seen": _see(os.getpid())}
    _require_free(path, folder)
    _write(path, owner)
    time.sleep(_SETTLE_SECONDS)  # long enough for another job that saw no lock to write its own
    other = _read(path)
    if other is None or other["id"] != owner["id"]:  # None: a job that ended has just deleted it
        raise OptionsError(describe_refusal(other, folder))
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


def _require_free(path: str, folder: str) -> None:
    other = _read(path)
    if other is None:
        return
    if _has_ended(other):
        logger.warning(
            "%s has ended without giving %s back: it is taken over", name_owner(other), path
        )
        return
    left = other["renewed"] + STALE_SECONDS - time.time()
    if left <= 0:  # by two clocks: if ours is ahead, the job lives and renews
        seconds = 2 * RENEW_SECONDS
        logger.warning(
            "%s gave no sign of life: %s is taken over unless it gives one within %.0f s",
            *(name_owner(other), path, seconds),
        )
        time.sleep(seconds)
        before, other, left = other, _read(path), STALE_SECONDS
        if other in (before, None):
            return
    raise OptionsError(
        f"{describe_refusal(other, folder)}; if that job was killed, this command works "
        f"{min(left, STALE_SECONDS):.0f} s from now, or once {path} is deleted"
    )


def _renew(path: str, owner: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(RENEW_SECONDS):
        try:
            other = _read(path)
            if other is not None and other["id"] != owner["id"]:
                logger.warning("%s took over %s; stop one of the two jobs", name_owner(other), path)
                return
            _write(path, owner)
        except Exception as error:  # each store's client has types of its own
            logger.warning("%s could not be renewed; trying again: %s", path, error)


def _has_ended(owner: dict[str, Any]) -> bool:
    then, now = owner.get("seen"), _see(owner["process"])
    return bool(then and now and then[:2] == now[:2] and then != now)


def _see(process: int) -> list[str] | None:
    """Identity of a process: boot id, container id, start in ticks.

    Ticks are "" once it has ended, even as a zombie. None if it can't be seen.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = [boot, os.readlink("/proc/self/ns/pid")]
        with suppress(ProcessLookupError):
            os.kill(process, 0)
            # After the program's name, which may hold anything: state, …, start time.
            told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            return [*place, "" if told[0] in "ZX" else told[19]]
        return [*place, ""]
    return None


def _read(path: str) -> dict[str, Any] | None:
    try:
        if storage.num_bytes_of(path) is None:
            return None
        owner = json.loads(storage.read_bytes(path))
    except ValueError:  # being written
        return None
    except OSError:
        if storage.num_bytes_of(path) is not None:  # not just being removed
            raise
        return None
    return {"renewed": owner["started"], **owner}


def _write(path: str, owner: dict[str, Any]) -> None:
    with storage.open_to_write(path) as file:
        file.write(json.dumps({**owner, "renewed": time.time()}).encode())
