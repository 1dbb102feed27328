"""`python -m beam_jobs.score`: a teacher's losses of a dataset, once, beside its shards."""

from collections.abc import Sequence

from beam_jobs.running.run_options import configure_logging
from beam_jobs.running.runners import exit_status
from beam_jobs.score.job import score
from beam_jobs.score.mixture import score_mixture
from beam_jobs.score.options import parse_options
from pipeline.packing.mixture_file import is_mixture


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, see `exit_status`."""

    def work() -> None:
        options = parse_options(arguments)
        configure_logging("score", options.run)
        if is_mixture(options.dataset):
            score_mixture(options)
        else:
            score(options)

    return exit_status("score", work)
