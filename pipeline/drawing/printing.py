"""How commands print: line by line, and an error as one line."""

import os
import sys
from collections.abc import Callable, Iterable

from pipeline.command_line.failures import report
from pipeline.drawing.formatting import printable


def print_lines(name: str, make: Callable[[], Iterable[str]]) -> int:
    """Print a command's lines, which `make` gives; return its status: 0, or 2 if it could not run.

    Example:
        >>> print_lines("explore", lambda: ["one", "two"])
        one
        two
        0
    """
    try:
        for line in make():
            print(line, flush=True)
    except BrokenPipeError:
        # Whoever reads has enough (`| head`); stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        report(name, error, printable(str(error)))
        return 2
    return 0
