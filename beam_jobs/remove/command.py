"""The `vocag remove` command."""

from collections.abc import Sequence

from beam_jobs.remove.options import EXAMPLES, RemoveOptions
from beam_jobs.running.exits import exit_status
from pipeline.command_line.option_parsing import parse_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status, see `exit_status`."""

    def work() -> None:
        options = parse_options(RemoveOptions, arguments, prog="vocag remove", epilog=EXAMPLES)
        from beam_jobs.remove.removal import remove  # after the options: help needs no Beam

        remove(options)

    return exit_status("remove", work)
