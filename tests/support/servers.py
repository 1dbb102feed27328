"""Server processes that tests start, wait for and end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 180
END_SECONDS = 10

FAILURE = "ValueError: no teacher is known under that name"
"""What workers that can't align say of it, in one line."""

_FAILING_WORKER = """
import sys
if any("SdkHarness" in argument for argument in sys.orig_argv):
    from beam_jobs.align import buckets
    def align_documents(*arguments, **keywords):
        raise ValueError("no teacher is known\\nunder that name")
    buckets.align_documents = align_documents
"""


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
    return port


def require_program(path: Path, set_up: str) -> Path:
    """Return a program's path; skip the test where it is missing, and say what installs it."""
    if not path.exists():
        pytest.skip(f"{path} is not installed: {set_up}")
    return path


@contextlib.contextmanager
def serve(
    command: Sequence[str | Path],
    port: int,
    *,
    address: str = "localhost",
    environment: Mapping[str, str] = os.environ,
    log: Path | None = None,
    folder: Path | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server in a folder for as long as the context lasts, from when it accepts connections.

    What it prints goes to a log, or to a temporary file.
    """
    with log.open("w+b") if log else tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # with what it starts
        )
        try:
            if not accepts(process, port, address, seconds=start_seconds):
                output.seek(0)
                pytest.fail(f"{command[0]} did not start:\n{output.read().decode()}")
            yield process
        finally:
            end(process)


@contextlib.contextmanager
def answering(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[int]:
    """Answer HTTP requests in this process for as long as the context lasts; yield the port."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def accepts(
    process: "subprocess.Popen[bytes]",
    port: int,
    address: str = "localhost",
    *,
    seconds: float = START_SECONDS,
) -> bool:
    """Wait until a server accepts connections; return False where it ends or takes too long."""

    def is_open() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((address, port)):
            return True
        return False

    return wait_until(is_open, process, seconds=seconds)


def wait_until(
    is_true: Callable[[], bool], process: "subprocess.Popen[Any]", *, seconds: float
) -> bool:
    """Wait for something to become true; return False where a process ends first, or it takes long.

    What is waited for is the end of the process, a tenth of a second at a time.
    """
    for _ in range(round(seconds * 10)):
        if is_true():
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            return False
    return False


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a server and what it started: asked first, killed where it does not listen."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a server and what it started, as a machine that dies would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def worker_pool(
    port: int | None = None,
    *,
    log: Path | None = None,
    first: Path | None = None,
    on: Sequence[str] = (),
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run Beam's worker pool, which starts a worker process for whoever asks; yield its address.

    It is what `--environment_type EXTERNAL` of portable runners needs next to each of its machines.
    The `sitecustomize.py` of `first` runs first in it and in its workers; `on` is a command before
    the pool's, which runs it somewhere.
    """
    port = port or free_port()
    module = "apache_beam.runners.worker.worker_pool_main"
    command = [*on, sys.executable, "-m", module, f"--service_port={port}"]
    with serve(command, port, environment=worker_environment(first), log=log) as process:
        yield f"localhost:{port}", process


def worker_environment(first: Path | None = None) -> dict[str, str]:
    """Return an environment in which `python`, as Beam calls it, is this one with our code."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    code = [str(folder) for folder in (first, Path(__file__).parents[2]) if folder]
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(code)}


def write_failing_worker(folder: Path) -> Path:
    """Write what lets the workers of a pool fail in the middle of aligning; see `worker_pool`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_FAILING_WORKER)
    return folder
