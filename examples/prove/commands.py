"""Command lines that are run once: what is done is written down, what failed stops the rest."""

import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NoReturn

from tqdm import tqdm

DONE, LOGS = "done", "logs"


@dataclass(frozen=True)
class Command:
    """A command line that is run once.

    Attributes:
        name: of its record and its log.
        arguments: after the interpreter.
        cost: relative to other commands, for the progress.
        accepted: statuses that are no failure.
        spare: a file that nobody needs once the command is done.
    """

    name: str
    arguments: Sequence[object]
    cost: float = 1.0
    accepted: tuple[int, ...] = (0,)
    spare: Path | None = None

    def record(self, folder: Path) -> Path:
        """Return the file that says in this folder that it is done."""
        return folder / DONE / f"{self.name}.json"


Chain = Sequence[Command]
"""Commands of which each needs the one before it."""


@contextmanager
def only_one(folder: Path) -> Iterator[int]:
    """Hold a folder; yield the lock that commands inherit: it lasts as long as the last of them.

    Raises:
        SystemExit: somebody else holds it, or a command that they have left.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"{folder}: another run, or a command that a killed one has left, is at work here: "
                "wait for it, or end it"
            ) from None
        yield file.fileno()


def perform(
    folder: Path,
    chains: Iterable[Chain],
    bar: "tqdm[NoReturn]",
    *,
    jobs: int,
    settings: Mapping[str, str],
    lock: int,
) -> None:
    """Run what is not done yet, several chains at one time.

    Args:
        folder: of records and logs.
        chains: in the order in which they begin.
        bar: moves by the commands' costs.
        jobs: chains at one time.
        settings: environment variables.
        lock: of `only_one`.

    Raises:
        SystemExit: a command failed; names it and its log. No other is begun then.
    """
    stopped = Event()

    def run_chain(chain: Chain) -> None:
        for command in chain:
            if stopped.is_set():
                return
            _run(folder, command, settings, lock)
            with bar.get_lock():
                bar.set_postfix_str(command.name, refresh=False)
                bar.update(command.cost)

    left = [[c for c in chain if not c.record(folder).exists()] for chain in chains]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(run_chain, chain) for chain in left]):
                done.result()
        except BaseException:
            stopped.set()
            raise


def _run(folder: Path, command: Command, settings: Mapping[str, str], lock: int) -> None:
    words = [sys.executable, *map(str, command.arguments)]
    log, record = folder / LOGS / f"{command.name}.log", command.record(folder)
    for path in (log, record):
        path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        environment = os.environ | settings
        ended = subprocess.run(
            words, env=environment, stdout=file, stderr=file, pass_fds=(lock,), check=False
        )
    status = ended.returncode
    if status not in command.accepted:
        raise SystemExit(f"{shlex.join(words)}\nended with {status}: see {log}")
    if command.spare is not None:
        command.spare.unlink(missing_ok=True)
    seconds = round(time.monotonic() - started, 1)
    found = {"command": shlex.join(words), "seconds": seconds}
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(found) + "\n", "utf-8")
    temporary.replace(record)
