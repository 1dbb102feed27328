"""Commands that are killed in the middle, at a call of one of their functions."""

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

_PRELOADED = ["beam_jobs.align.command", "beam_jobs.score.job"]
"""Imported once: every killed command is a fork of the process that has done so."""


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    given = (command, arguments, functions, call, environment or {})
    process = context.Process(target=_run, args=given)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


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
