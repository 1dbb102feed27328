"""Processes that are forks of one that has imported what they need: Python's server of forks."""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any, cast


def fork_context(
    modules: Sequence[str], environment: Mapping[str, str] | None = None
) -> ForkServerContext:
    """Return a context whose processes have imported modules, in an environment.

    Python has one server in a process, whose modules are those of who asked first: ranks of
    Megatron would be forks with Beam imported, and the other way round. So a server with other
    modules is ended.
    """
    context = multiprocessing.get_context("forkserver")
    server = cast(Any, forkserver)._forkserver
    if server._preload_modules != list(modules):
        server._stop()
        context.set_forkserver_preload(list(modules))
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
    return context
