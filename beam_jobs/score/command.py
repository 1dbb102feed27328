"""The `vocag score` command."""

from collections.abc import Sequence

from beam_jobs.job_errors import JobError
from beam_jobs.running.exits import exit_status
from beam_jobs.running.run_options import configure_logging
from beam_jobs.score.options import ScoreOptions, parse_options
from pipeline.command_line.option_parsing import naming_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status, see `exit_status`."""

    def work() -> None:
        options = parse_options(arguments)
        configure_logging("score", options.run)
        # After the options: help needs neither Beam nor torch.
        from beam_jobs.score.job import score

        # A worker's error ends the job with a JobError of its words.
        with naming_options(ScoreOptions, errors=(ValueError, JobError)):
            score(options)

    return exit_status("score", work)
