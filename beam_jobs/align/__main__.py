"""`python -m beam_jobs.align`; help imports neither Beam nor the job."""

import sys
import time
from collections.abc import Sequence

from beam_jobs.align.options import parse_options
from beam_jobs.running.exits import exit_status
from beam_jobs.running.run_options import configure_logging
from pipeline.command_line import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status, see `exit_status`."""
    started = time.monotonic()

    def work() -> None:
        options = parse_options(arguments)
        configure_logging("align", options.run)
        from beam_jobs.align.command import align, describe
        from beam_jobs.job_errors import TooManyDeadLettersError

        if options.dry_run:
            told, loss = describe(options)
            print(told)
            if loss:
                raise TooManyDeadLettersError(loss)
        else:
            align(options, started=started)

    return exit_status("align", work)


if __name__ == "__main__":
    commands.main(["align", *sys.argv[1:]])
