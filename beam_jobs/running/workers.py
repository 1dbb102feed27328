"""Worker processes of this machine.

Beam's direct runner starts them by a shell command and reports only their status. Our command keeps
their output in a file named after the process.
"""

import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory

import grpc
from apache_beam.transforms.environments import SubprocessSDKEnvironment

from beam_jobs.running.exits import skip_last_collection
from pipeline.command_line.failures import left_behind

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from beam_jobs.running.workers import main; main(int(sys.argv[2]))"
)
_ENDED = re.compile(r"Worker subprocess exited with return code (-?\d+)")
"""Message of Beam's (2.77) error in a worker's thread, `run_worker`."""

_LOG_BYTES = 64 << 10
_LOOK_SECONDS, _END_SECONDS, _PATIENCE_SECONDS = 1.0, 1.0, 5.0

type _Outcomes = SimpleQueue[BaseException | None]
"""What ended a job; None if its work is done."""


class WorkerDiedError(RuntimeError):
    """A worker process ended before the job; `log` is the end of its output."""

    def __init__(self, message: str, log: str) -> None:
        """Take message and log."""
        super().__init__(message)
        self.log = log


class Workers:
    """One job's worker processes; the runner starts them by `environment`.

    Verbose ones write to this process's stderr instead of files.
    """

    def __init__(self, *, verbose: bool) -> None:
        """Start none yet."""
        self._folder = TemporaryDirectory(prefix="vocag-workers-")
        self.verbose = verbose

    @property
    def environment(self) -> SubprocessSDKEnvironment:
        """Beam's command for one, deaf to Ctrl-C; `$$` is its number."""
        arguments = [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(os.getpid())]
        log = f"{shlex.quote(self._folder.name)}/$$"
        output = "" if self.verbose else f">{log} 2>&1"
        command = f"trap '' INT; : >{log}; exec {shlex.join(arguments)} </dev/null {output}"
        return SubprocessSDKEnvironment.from_command_string(command)

    @property
    def have_started(self) -> bool:
        """Whether any has started."""
        return bool(self._logs())

    def kill(self) -> None:
        """Kill all workers and wait for their end."""
        for log in self._logs():
            with suppress(ProcessLookupError):
                os.kill(int(log.name), signal.SIGKILL)
        for thread in threading.enumerate():
            if thread.name == "run_worker":
                thread.join(_PATIENCE_SECONDS)

    def close(self) -> None:
        """Remove the workers' output."""
        self._folder.cleanup()

    def explain(self, failure: BaseException | None) -> WorkerDiedError | None:
        """Name the dead worker and its cause; None for other failures."""
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


def run_supervised(work: Callable[[], object], workers: Workers) -> None:
    """Run a local job's `work` in a thread until it ends, a worker dies, or a signal arrives.

    Raise its error, WorkerDiedError, KeyboardInterrupt or Terminated. Beam can't cancel a local
    job: a thread that runs on is abandoned, and `leave` doesn't wait for it.
    """
    outcomes: _Outcomes = SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the thread that waits
            outcomes.put(error)
        else:
            outcomes.put(None)

    thread = threading.Thread(target=run, name="job", daemon=True)
    with closing(workers), _listen_to_threads(workers, outcomes):
        thread.start()
        try:
            outcome = outcomes.get()
            if outcome is not None:
                raise _cause(outcome, outcomes, workers)
        except BaseException:
            workers.kill()
            thread.join(_END_SECONDS)
            if thread.is_alive():
                left_behind.append(thread)
            raise
    thread.join()


def main(launcher: int) -> None:
    """In a worker process, serve the runner until it is done or gone."""
    from apache_beam.runners.worker import sdk_worker_main  # the launcher needs none of it

    skip_last_collection()
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    del os.environ["LOGGING_API_SERVICE_DESCRIPTOR"]  # its log goes to its own file
    sdk_worker_main.main([])


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        threading.Event().wait(_LOOK_SECONDS)
    os._exit(1)


def _cause(outcome: BaseException, outcomes: _Outcomes, workers: Workers) -> BaseException:
    """A worker's death if reported, perhaps after Beam's resulting error."""
    if isinstance(outcome, WorkerDiedError) or not workers.have_started:
        return outcome
    try:
        return outcomes.get(timeout=_END_SECONDS) or outcome
    except Empty:
        return outcome


@contextmanager
def _listen_to_threads(workers: Workers, outcomes: _Outcomes) -> Iterator[None]:
    """Report workers' deaths; silence gRPC's errors in Beam's threads."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        death = workers.explain(failure.exc_value)
        if death is not None:
            outcomes.put(death)
        elif workers.verbose or not issubclass(failure.exc_type, grpc.RpcError):
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def _explain(status: int, log: str) -> str:
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
