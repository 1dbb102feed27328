"""Server processes that tests start, wait for and end."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

START_SECONDS = 60
END_SECONDS = 10


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
    environment: Mapping[str, str] = os.environ,
    log: Path | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server for as long as the context lasts, from when it accepts connections.

    Args:
        command: the program and its arguments.
        port: of this machine, where it listens.
        environment: the process's.
        log: a file for what it prints; a temporary one unless given.
    """
    with log.open("w+b") if log else tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            if not accepts(process, port):
                output.seek(0)
                pytest.fail(f"{command[0]} did not start:\n{output.read().decode()}")
            yield process
        finally:
            end(process)


def accepts(process: "subprocess.Popen[bytes]", port: int) -> bool:
    """Wait until a server accepts connections; return False where it ends or takes too long."""
    for _ in range(START_SECONDS * 10):
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            return False
    return False


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process: asked first, killed where it does not listen."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def worker_pool(log: Path | None = None) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run Beam's worker pool, which starts a worker process for whoever asks; yield its address.

    It is what `--environment_type EXTERNAL` of a portable runner needs beside each of its machines.
    """
    port = free_port()
    module = "apache_beam.runners.worker.worker_pool_main"
    command = [sys.executable, "-m", module, f"--service_port={port}"]
    with serve(command, port, environment=_worker_environment(), log=log) as process:
        yield f"localhost:{port}", process


def _worker_environment() -> dict[str, str]:
    """Return an environment in which `python`, as the pool calls it, is this one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}
