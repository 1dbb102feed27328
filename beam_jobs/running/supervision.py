"""A job that its launcher can leave: at once when it is told to end, or when a worker has died.

The runner works in a thread, and the main thread waits for the first of three: its end, the death
of a worker, a signal. Beam has no way to cancel a local job, so a thread that does not end within a
moment is left behind, and `vocag_cli.leave` ends the process without waiting for it.
"""

import atexit
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

import grpc

from beam_jobs.running.workers import Workers, supervise_workers
from vocag_cli import left_behind

_PATIENCE_SECONDS = 1.0


class Terminated(BaseException):
    """SIGTERM has arrived; like KeyboardInterrupt, nothing but the command's end catches it."""


def skip_last_collection() -> None:
    """Spare this process Python's last collections when it ends.

    They would look at every object of Beam and of two vocabularies, 0.7 s in each process, and
    whoever started workers waits for theirs. A process with triton, of a teacher's, collects: its
    bindings (nanobind) print whatever is left as a leak, page after page.
    """
    atexit.register(_freeze_unless_bindings_complain)


def run_supervised(work: Callable[[], None], *, verbose: bool = False) -> None:
    """Run a local job's `work`, in a thread, until it ends or must end.

    Raises:
        WorkerDiedError: a worker process ended before the job did.
        Exception: what `work` raised.
        KeyboardInterrupt, Terminated: as they arrived; no worker is left then.
    """
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the thread that waits
            outcomes.put(error)
        else:
            outcomes.put(None)

    workers = Workers(outcomes.put, verbose=verbose)
    thread = threading.Thread(target=run, name="job", daemon=True)
    with supervise_workers(workers), _quiet_threads(verbose):
        thread.start()
        try:
            outcome = outcomes.get()
            if outcome is not None:
                raise workers.await_death() or outcome
        except BaseException:
            _end(thread, workers)
            raise
    thread.join()


def _freeze_unless_bindings_complain() -> None:
    if "triton" not in sys.modules:
        gc.freeze()


@contextmanager
def terminate_by_exception() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(thread: threading.Thread, workers: Workers) -> None:
    workers.kill()
    thread.join(_PATIENCE_SECONDS)
    if thread.is_alive():
        left_behind.append(thread)


@contextmanager
def _quiet_threads(verbose: bool) -> Iterator[None]:
    """Let Beam's threads end without a traceback each where a worker is gone."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if verbose or not issubclass(failure.exc_type, grpc.RpcError):
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def _raise_terminated(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated
