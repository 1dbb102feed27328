"""The `vocag score` command."""

from collections.abc import Sequence

from beam_jobs.running.exits import exit_status
from beam_jobs.running.run_options import configure_logging
from beam_jobs.score.options import parse_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status, see `exit_status`."""

    def work() -> None:
        options = parse_options(arguments)
        configure_logging("score", options.run)
        # After the options: help needs neither Beam nor torch.
        from beam_jobs.score.job import score

        score(options)

    return exit_status("score", work)
