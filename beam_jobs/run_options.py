"""Options of every job: how it runs on this machine and what it says meanwhile."""

import argparse
import logging
import os
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class RunOptions:
    """How a job runs; nothing here changes a byte of the result.

    Attributes:
        workers: processes on this machine; 1 works in the launcher itself.
        quiet: say nothing but errors.
        verbose: say what Beam and its workers say, too.
    """

    workers: int = 1
    quiet: bool = False
    verbose: bool = False

    def beam_arguments(self) -> list[str]:
        """Return Beam's options for the number of workers."""
        if self.workers == 1:
            return []
        return [f"--direct_num_workers={self.workers}", "--direct_running_mode=multi_processing"]

    def say(self, text: str) -> None:
        """Print what is no error."""
        if not self.quiet:
            print(text)


HERE = RunOptions()
"""One process, the launcher's own."""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's own."""
    add = parser.add_argument
    add("--workers", type=_parse_workers, default=1, metavar="N",
        help="processes on this machine (default: 1)")  # fmt: skip
    add("--quiet", action="store_true", help="say nothing but errors")
    add("--verbose", action="store_true", help="say what Beam says, too")


def take_run_options(values: dict[str, Any]) -> RunOptions:
    """Take the options out of a command line's values."""
    return RunOptions(**{field.name: values.pop(field.name) for field in fields(RunOptions)})


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command."""
    names = [name for action in parser._actions for name in action.option_strings]
    return [name for name in names if name.startswith("--")]


def configure_logging(command: str, options: RunOptions) -> None:
    """Let our warnings be one line each on stderr, and Beam's and gRPC's be asked for."""
    level = logging.ERROR if options.quiet else logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(format=f"vocag {command}: %(message)s")
    logging.getLogger().setLevel(level)
    if not options.verbose:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        for name in ("apache_beam", "grpc"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _parse_workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no number of processes; write 1 or more')
    return int(text)
