"""Worker processes of this machine: started, watched, and gone when the job is.

Beam's own runner starts workers in a thread each and forgets them: a worker that is killed before
it has connected leaves the job waiting for ever, one that is killed later ends it with Beam's and
gRPC's tracebacks. Ours are started here instead, so that a dead one is noticed and named.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from apache_beam.portability import python_urns
from apache_beam.portability.api import endpoints_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import (
    GrpcWorkerHandler,
    WorkerHandler,
)
from google.protobuf import json_format, text_format

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from beam_jobs.running.worker_process import main; main()"
)
_LOG_BYTES = 64 << 10
_PATIENCE_SECONDS = 0.5  # between Beam's complaint about a worker and the news of its death


class WorkerDiedError(RuntimeError):
    """A worker process ended before the job did; `log` is the end of what it printed."""

    def __init__(self, message: str, log: str) -> None:
        """Hold the sentence for the user and the worker's last words."""
        super().__init__(message)
        self.log = log


@dataclass
class _Worker:
    number: int
    process: "subprocess.Popen[bytes]"
    log: BinaryIO | None
    connection: Any
    watcher: threading.Thread | None = None


class Workers:
    """The worker processes of one job.

    Args:
        on_death: is told of the first worker that ends too early, from a thread.
        verbose: workers write to this process's stderr, not to files of their own.
    """

    def __init__(self, on_death: Callable[[WorkerDiedError], None], *, verbose: bool) -> None:
        """Start none yet; the runner asks for them."""
        self._on_death = on_death
        self._verbose = verbose
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._ending = False
        self._oom_kills = _count_oom_kills()
        self._death: WorkerDiedError | None = None

    def start(self, environment: dict[str, str], connection: Any) -> "subprocess.Popen[bytes]":
        """Start and watch one more worker.

        Args:
            environment: variables that Beam's worker reads, on top of ours.
            connection: what the runner waits on; aborted if the worker dies.
        """
        log = None if self._verbose else TemporaryFile()  # noqa: SIM115
        with self._lock:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path)],
                stdin=subprocess.PIPE,  # closes when this process ends, however it does
                stdout=log or sys.stderr.fileno(),
                stderr=log or sys.stderr.fileno(),
                env={"GRPC_VERBOSITY": "NONE", **os.environ, **environment},
                process_group=0,  # Ctrl-C is for the launcher
            )
            worker = _Worker(len(self._workers) + 1, process, log, connection)
            self._workers.append(worker)
            worker.watcher = threading.Thread(target=self._watch, args=(worker,), daemon=True)
            worker.watcher.start()
        return process

    def await_death(self) -> WorkerDiedError | None:
        """Return why a worker died, where one has or does within a moment."""
        for worker in self._workers:
            try:
                worker.process.wait(_PATIENCE_SECONDS / len(self._workers))
            except subprocess.TimeoutExpired:
                continue
            if worker.watcher is not None:
                worker.watcher.join()
        return self._death

    def kill(self) -> None:
        """End all workers now, and whatever waits for them."""
        with self._lock:
            self._ending = True
            for worker in self._workers:
                worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            _close(worker)
            worker.connection.abort(RuntimeError("the workers were ended"))

    def _watch(self, worker: _Worker) -> None:
        status = worker.process.wait()
        with self._lock:
            if status == 0 or self._ending:
                return
            self._ending = True  # the first death is the cause of the others
            log = _end_of(worker.log)
            reason = _explain(status, log, out_of_memory=_count_oom_kills() > self._oom_kills)
            self._death = WorkerDiedError(f"worker process {worker.number} {reason}", log)
        self._on_death(self._death)


@contextmanager
def supervise_workers(workers: Workers) -> Iterator[None]:
    """Let Beam's runner start its worker processes through `workers`."""
    registered = WorkerHandler._registered_environments
    theirs = registered[python_urns.SUBPROCESS_SDK]
    registered[python_urns.SUBPROCESS_SDK] = partial(_WorkerHandler, workers), bytes
    try:
        yield
    finally:
        registered[python_urns.SUBPROCESS_SDK] = theirs


class _WorkerHandler(GrpcWorkerHandler):
    """One worker process, as Beam's runner sees it."""

    def __init__(
        self, workers: Workers, command: bytes, state: Any, provision_info: Any, grpc_server: Any
    ) -> None:
        """Start nothing yet; `command` is Beam's and not used."""
        super().__init__(state, provision_info, grpc_server)
        self._workers = workers
        self._process: subprocess.Popen[bytes] | None = None

    def start_worker(self) -> None:
        """Start the process; it connects to the runner by itself."""
        control = endpoints_pb2.ApiServiceDescriptor(url=self.control_address)
        options = self.provision_info.provision_info.pipeline_options
        environment = {
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(control),
            "PIPELINE_OPTIONS": json_format.MessageToJson(options),
            "WORKER_ID": self.worker_id,
        }
        self._process = self._workers.start(environment, self.control_conn)

    def stop_worker(self) -> None:
        """Wait for a process that has been told to end."""
        if self._process is not None:
            self._process.wait()


def _explain(status: int, log: str, *, out_of_memory: bool) -> str:
    """Return what ended a process, from its exit status and its last words."""
    if status == -signal.SIGKILL:
        if out_of_memory:
            return "was killed by the kernel, for the machine ran out of memory"
        return "was killed (SIGKILL): by hand, or because memory ran out"
    if status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    lines = log.strip().splitlines()
    return f"ended with status {status}{f': {lines[-1]}' if lines else ''}"


def _count_oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory; 0 where it won't say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _close(worker: _Worker) -> None:
    for stream in (worker.process.stdin, worker.log):
        if stream is not None:
            stream.close()


def _end_of(log: BinaryIO | None) -> str:
    if log is None:
        return ""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LOG_BYTES))
    return log.read().decode(errors="replace")
