"""Worker processes of this machine: started by a command of ours, named when they die, and ended.

Beam's direct runner starts each worker by a shell command, in a thread that raises where the
process ends with a status other than 0, and has no more to say: not which signal, nor its last
words. So our command keeps what the worker prints in a file that is named after the process.
"""

import json
import os
import re
import shlex
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from apache_beam.transforms.environments import SubprocessSDKEnvironment

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from beam_jobs.running.worker_process import main; main(int(sys.argv[2]))"
)
_ENDED = re.compile(r"Worker subprocess exited with return code (-?\d+)")
"""What Beam (2.77) raises in a worker's thread, which it calls `run_worker`."""

_LOG_BYTES = 64 << 10
_PATIENCE_SECONDS = 5.0


class WorkerDiedError(RuntimeError):
    """A worker process ended before the job did; `log` is the end of what it printed."""

    def __init__(self, message: str, log: str) -> None:
        """Hold the sentence for the user and the worker's last words."""
        super().__init__(message)
        self.log = log


class Workers:
    """The worker processes of one job; the runner starts them by `environment`.

    Verbose ones write to this process's stderr, not to files of their own.
    """

    def __init__(self, *, verbose: bool) -> None:
        """Start none yet."""
        self._folder = TemporaryDirectory(prefix="vocag-workers-")
        self._verbose = verbose

    @property
    def environment(self) -> SubprocessSDKEnvironment:
        """How Beam starts one: deaf to Ctrl-C, which is for the launcher; `$$` is its number."""
        arguments = [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(os.getpid())]
        log = f"{shlex.quote(self._folder.name)}/$$"
        output = "" if self._verbose else f">{log} 2>&1"
        command = f"trap '' INT; : >{log}; exec {shlex.join(arguments)} </dev/null {output}"
        return SubprocessSDKEnvironment.from_command_string(command)

    @property
    def have_started(self) -> bool:
        """Whether the runner has asked for any."""
        return bool(self._logs())

    def kill(self) -> None:
        """End all workers now, and wait until they are gone."""
        for log in self._logs():
            with suppress(ProcessLookupError):
                os.kill(int(log.name), signal.SIGKILL)
        for thread in threading.enumerate():
            if thread.name == "run_worker":
                thread.join(_PATIENCE_SECONDS)

    def close(self) -> None:
        """Remove what the workers have printed."""
        self._folder.cleanup()

    def explain(self, failure: BaseException | None) -> WorkerDiedError | None:
        """Return which worker died of what, if that is why a thread of Beam's has failed."""
        ended = _ENDED.fullmatch(str(failure))
        if ended is None:
            return None
        logs = self._logs()
        number, dead = next(
            (item for item in enumerate(logs, 1) if not _is_alive(int(item[1].name))), (0, None)
        )
        log = dead.read_bytes()[-_LOG_BYTES:].decode(errors="replace") if dead else ""
        return WorkerDiedError(f"worker process {number} {_explain(int(ended[1]), log)}", log)

    def _logs(self) -> list[Path]:
        return sorted(Path(self._folder.name).iterdir(), key=lambda log: int(log.name))


def _explain(status: int, log: str) -> str:
    """Return what ended a process, from its exit status and its last words."""
    if status == -signal.SIGKILL:
        return "was killed (SIGKILL): by hand, or because memory ran out"
    if status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    lines = log.strip().splitlines()
    return f"ended with status {status}{f': {lines[-1]}' if lines else ''}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
