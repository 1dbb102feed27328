"""Options of every job."""

import logging
import os
from dataclasses import dataclass

from beam_jobs.job_errors import OptionsError
from pipeline.command_line.logs import set_up_logging


@dataclass(frozen=True)
class RunOptions:
    """How a job runs; nothing here changes a byte of the result.

    Attributes:
        workers: processes on this machine; 1 works in the launcher itself.
        quiet: print only errors.
        verbose: also print the messages of Beam and its workers.
    """

    workers: int = 1
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise OptionsError(f"--workers {self.workers} is below 1 process")

    def say(self, text: str) -> None:
        """Print a message that isn't an error."""
        if not self.quiet:
            print(text)


HERE = RunOptions()
"""One process, the launcher's own."""


def configure_logging(command: str, options: RunOptions) -> None:
    """Log our warnings as lines on stderr; Beam's and gRPC's only if `verbose`."""
    level = logging.ERROR if options.quiet else logging.INFO if options.verbose else logging.WARNING
    set_up_logging(f"vocag {command}", level)
    if not options.verbose:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        for name in ("apache_beam", "grpc"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    for handler in logging.getLogger().handlers:
        (handler.removeFilter if options.verbose else handler.addFilter)(_is_not_beams)


def _is_not_beams(record: logging.LogRecord) -> bool:
    """Whether a record comes from outside Beam, whose loggers have various names."""
    return "apache_beam/" not in record.pathname
