"""Commands in processes of their own, forked from one that has imported everything."""

import os
import resource
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from tests.support.datasets import byte_level
from vocag_cli import COMMANDS, main

LONGEST_SECONDS = 180.0


def import_commands() -> None:
    """Import once what every command would import."""
    for name in ("align", "remove"):
        import_module(COMMANDS[name][0])
    document = SourceDocument("compiles kernels", "é".encode())
    align_batch([document], byte_level(300), byte_level(340))


class Process:
    """A command that runs.

    Attributes:
        status: None while it runs; negative for a signal.
        said: its output, once it has ended.
    """

    def __init__(
        self, arguments: list[str], folder: Path, fault: dict[str, Any] | None = None
    ) -> None:
        """Start it; a fault kills it at the n-th use of a file below a folder, or limits files."""
        self.status: int | None = None
        self.said, self.started = "", time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._pid = os.fork()
        if self._pid == 0:
            os._exit(self._run(arguments, folder, fault or {}))

    def _run(self, arguments: list[str], folder: Path, fault: dict[str, Any]) -> int:
        try:
            os.setsid()
            os.dup2(self._output.fileno(), 1)
            os.dup2(self._output.fileno(), 2)
            if fault.get("kind") == "limit":  # its own output is such a file, too
                limit = 4096 + fault["bytes"]
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            if fault.get("kind") == "kill":
                _die_at(fault["event"], folder)
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 99
        finally:
            sys.stdout.flush()

    def seconds(self) -> float:
        """Return how long it has run."""
        return time.monotonic() - self.started

    def kill(self) -> None:
        """Kill it and what it has started."""
        os.killpg(self._pid, signal.SIGKILL)

    def ended(self) -> bool:
        """Return whether it has ended; what hangs is killed."""
        pid, status = (0, 0) if self.status is not None else os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
            self._output.seek(0)
            self.said = self._output.read().decode("utf-8", "replace")
        elif self.seconds() > LONGEST_SECONDS and self.status is None:
            self.kill()
        return self.status is not None

    def end(self) -> "Process":
        """Wait for its end."""
        while not self.ended():
            time.sleep(0.01)
        return self


def _die_at(event: int, folder: Path) -> None:
    left = [event]

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        named = name.startswith(("open", "os.", "shutil.")) and arguments
        if named and str(arguments[0]).startswith(str(folder)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
