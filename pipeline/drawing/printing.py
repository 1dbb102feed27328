"""How commands print lines and errors."""

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path

from pipeline.command_line.failures import naming, report


def prints[**P](name: str) -> Callable[[Callable[P, Iterable[str]]], Callable[P, int]]:
    """Make a command of a function that yields lines; it returns 0, or 2 if it failed."""

    def command(lines: Callable[P, Iterable[str]]) -> Callable[P, int]:
        @wraps(lines)
        def main(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                for line in lines(*args, **kwargs):
                    print(line, flush=True)
            except (ValueError, OSError) as error:
                report(name, error)
                return 2
            return 0

        return main

    return command


def write_page(path: Path, page: str) -> None:
    """Write a page; an error names the file."""
    with naming(str(path)):
        path.write_text(page, "utf-8")
