"""Processes without their start-up: commands that are killed in the middle, and ranks."""

import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import psutil

from tests.support.fork_server import fork_context
from tests.support.servers import free_port

_PRELOADED = ["beam_jobs.align.command", "beam_jobs.score.job", "pipeline.training.loop"]
"""Imported once: every process here is a fork of the one that has done so."""


def run_ranks(work: Callable[..., None], *arguments: object) -> None:
    """Call a function in two processes that find each other as torchrun's do.

    Raises:
        ProcessRaisedException: one of them has failed.
    """
    import torch.multiprocessing  # killed commands need no torch here

    fork_context(_PRELOADED)
    given = work, free_port(), arguments
    torch.multiprocessing.start_processes(_be_rank, given, nprocs=2, start_method="forkserver")


def run_killed(
    command: str,
    arguments: Sequence[str],
    functions: Sequence[str],
    *,
    call: int,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a module's `main` in a process of its own, which must be killed at a call of a function.

    Calls of functions, such as "beam_jobs.storage.publish", are counted together, from 1.
    """
    given = (command, arguments, functions, call, environment or {})
    process = fork_context(_PRELOADED).Process(target=_run, args=given)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def processes_that_name(text: str) -> list[int]:
    """Return the processes of this machine whose environment or command names a path."""
    told = {each.pid: str(each.info) for each in psutil.process_iter(["cmdline", "environ"])}
    return [pid for pid, info in told.items() if text in info]


def require_ended(text: str) -> None:
    """Wait some seconds for the end of the processes that name a path."""
    for pid in processes_that_name(text):
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        assert ended.poll(5000), f"process {pid} lives on"


def _be_rank(rank: int, work: Callable[..., None], port: int, arguments: Sequence[object]) -> None:
    world = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **world}
    work(*arguments)


def _run(
    command: str,
    arguments: Sequence[str],
    functions: Sequence[str],
    call: int,
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    calls: list[str] = []

    def dies(name: str, original: Any) -> Any:
        def counted(*given: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **options)

        return counted

    for path in functions:
        module, _, name = path.rpartition(".")
        owner = import_module(module)
        setattr(owner, name, dies(name, getattr(owner, name)))
    import_module(command).main(arguments)
