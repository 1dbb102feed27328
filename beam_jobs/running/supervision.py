"""A job that its launcher can leave: at once when it is told to end, or when a worker has died.

The runner works in a thread, and the main thread waits for the first of three: its end, the death
of a worker, a signal. Beam has no way to cancel a local job, so a thread that does not end within a
moment is left behind, and the command's `leave` ends the process without waiting for it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from queue import Empty, SimpleQueue

import grpc

from beam_jobs.running.workers import WorkerDiedError, Workers
from pipeline.command_line.failures import left_behind

_PATIENCE_SECONDS = 1.0


def run_supervised(work: Callable[[], object], workers: Workers, *, verbose: bool = False) -> None:
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

    thread = threading.Thread(target=run, name="job", daemon=True)
    with closing(workers), _listen_to_threads(workers, outcomes, verbose):
        thread.start()
        try:
            outcome = outcomes.get()
            if outcome is not None:
                raise _cause(outcome, outcomes, workers)
        except BaseException:
            workers.kill()
            thread.join(_PATIENCE_SECONDS)
            if thread.is_alive():
                left_behind.append(thread)
            raise
    thread.join()


def _cause(
    outcome: BaseException, outcomes: "SimpleQueue[BaseException | None]", workers: Workers
) -> BaseException:
    """Return a worker's death, the news of which may follow what Beam complains of it."""
    if isinstance(outcome, WorkerDiedError) or not workers.have_started:
        return outcome
    try:
        return outcomes.get(timeout=_PATIENCE_SECONDS) or outcome
    except Empty:
        return outcome


@contextmanager
def _listen_to_threads(
    workers: Workers, outcomes: "SimpleQueue[BaseException | None]", verbose: bool
) -> Iterator[None]:
    """Hear of a worker's death, and let Beam's threads end without a traceback each after it."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        death = workers.explain(failure.exc_value)
        if death is not None:
            outcomes.put(death)
        elif verbose or not issubclass(failure.exc_type, grpc.RpcError):
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before
