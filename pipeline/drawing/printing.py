"""How commands print: line by line, and an error as one line."""

import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps

from pipeline.command_line.failures import report
from pipeline.drawing.formatting import printable


def prints[**P](name: str) -> Callable[[Callable[P, Iterable[str]]], Callable[P, int]]:
    """Make a command of a function that gives its lines; it returns 0, or 2 if it could not run.

    Example:
        >>> prints("explore")(lambda: ["one", "two"])()
        one
        two
        0
    """

    def command(lines: Callable[P, Iterable[str]]) -> Callable[P, int]:
        @wraps(lines)
        def main(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                for line in lines(*args, **kwargs):
                    print(line, flush=True)
            except BrokenPipeError:
                # Whoever reads has enough (`| head`); stdout must not be flushed again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except (ValueError, OSError) as error:
                report(name, error, printable(str(error)))
                return 2
            return 0

        return main

    return command
