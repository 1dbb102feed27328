"""How a command ends."""

import atexit
import gc
import sys
from collections.abc import Callable
from contextlib import suppress

from beam_jobs.job_errors import JobError, TooManyDeadLettersError
from beam_jobs.shortages import explain_shortage
from pipeline.command_line.failures import report
from pipeline.command_line.termination import Terminated, terminate_by_exception

RESUME = "run the same command again to resume"
_BINDINGS = {"triton", "duckdb"}  # of a teacher, and of --where


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


def _freeze_unless_bindings_complain() -> None:
    if not _BINDINGS & sys.modules.keys():
        gc.freeze()
