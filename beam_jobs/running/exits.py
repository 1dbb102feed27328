"""How a command ends."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from beam_jobs.job_errors import JobError, TooManyDeadLettersError
from beam_jobs.shortages import explain_shortage
from pipeline.command_line.failures import report

RESUME = "run the same command again to resume"
_BINDINGS = {"triton", "duckdb"}  # of a teacher, and of --where


_AGAIN_SECONDS = 5.0
"""After a signal; a job's clean-up takes less."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; only the command's end catches it."""

    def __init__(self, number: int) -> None:
        """Take the signal."""
        self.how = "the terminal is gone" if number == signal.SIGHUP else "terminated"
        self.status = 128 + number


def exit_status(command: str, work: Callable[[], object]) -> int:
    """Run a command's work; return 0, 1 for a failed job or a shortage, 2 for wrong usage.

    3: more input was left out than allowed. 129, 130 and 143: SIGHUP, Ctrl-C and SIGTERM. Errors go
    to stderr without a traceback.
    """
    skip_last_collection()
    try:
        with terminate_by_exception():
            work()
    except (ValueError, OSError, MemoryError) as error:
        shortage = explain_shortage(f"{type(error).__name__}: {error}", ".")
        if shortage is not None:
            report(f"vocag {command}", error, f"{shortage}; {RESUME}")
            return 1
        report(f"vocag {command}: error", error)
        return 2
    except (JobError, TooManyDeadLettersError) as error:
        report(f"vocag {command}", error)
        return 1 if isinstance(error, JobError) else 3
    except (KeyboardInterrupt, Terminated) as end:
        how, status = (end.how, end.status) if isinstance(end, Terminated) else ("interrupted", 130)
        with suppress(OSError):  # nobody may be there to read it
            print(f"vocag {command}: {how}; {RESUME}", file=sys.stderr, flush=True)
        return status
    return 0


def skip_last_collection() -> None:
    """Skip Python's garbage collections at exit.

    They take 0.7 s in each process. With nanobind bindings they still run: otherwise these print
    pages of leaks.
    """
    atexit.register(_freeze_unless_bindings_complain)


@contextmanager
def terminate_by_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated` in the main thread, even if Python loses it.

    A handler may run where nothing can be raised, such as a weak reference's callback, and
    libraries have bare `except:`. So the signal is sent again until the block ends; others' signals
    are ignored meanwhile. SIGHUP stays ignored under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    ended, again = threading.Event(), threading.Event()

    def terminate(number: int, _frame: FrameType | None) -> None:
        if not arrived:
            arrived.append(number)
            threading.Thread(target=_repeat, args=(number, ended, again), daemon=True).start()
        elif not again.is_set():
            return
        again.clear()
        raise Terminated(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, terminate)
        try:
            yield
        finally:
            if arrived:
                raise Terminated(arrived[0])
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _repeat(number: int, ended: threading.Event, again: threading.Event) -> None:
    while not ended.wait(_AGAIN_SECONDS):
        again.set()
        os.kill(os.getpid(), number)


def _freeze_unless_bindings_complain() -> None:
    if not _BINDINGS & sys.modules.keys():
        gc.freeze()
