"""How a job's command ends: with which status, with which words, and how fast."""

import atexit
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from beam_jobs.errors import JobError, TooManyDeadLettersError
from beam_jobs.shortages import explain_shortage
from pipeline.command_line.failures import report

RESUME = "run the same command again to resume"
_BINDINGS = {"triton", "duckdb"}  # of a teacher, and of --where


class Terminated(BaseException):
    """SIGTERM has arrived; like KeyboardInterrupt, nothing but the command's end catches it."""


def exit_status(command: str, work: Callable[[], object]) -> int:
    """Run a command's work; return 0, 1 if the job failed, 2 for wrong usage.

    3 is the status of a dataset that is written, but without more of its input than was allowed.
    What went wrong is said on stderr, without a traceback. 130 and 143 are what shells expect of a
    command that Ctrl-C or SIGTERM ended.
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
        how, status = ("terminated", 143) if isinstance(end, Terminated) else ("interrupted", 130)
        print(f"vocag {command}: {how}; {RESUME}", file=sys.stderr)
        return status
    return 0


def skip_last_collection() -> None:
    """Spare this process Python's last collections when it ends.

    They would look at every object of Beam and of two vocabularies, 0.7 s in each process, and
    whoever started workers waits for theirs. A process with bindings by nanobind collects: they
    print whatever is left as a leak, page after page.
    """
    atexit.register(_freeze_unless_bindings_complain)


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


def _freeze_unless_bindings_complain() -> None:
    if not _BINDINGS & sys.modules.keys():
        gc.freeze()


def _raise_terminated(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated
