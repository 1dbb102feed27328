"""`vocag add-teacher`: another teacher's tokens of an aligned dataset, beside its shards."""

from collections.abc import Sequence

from beam_jobs.views.command import run_command
from vocag_cli import leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, see `exit_status`."""
    return run_command("teacher", arguments)


if __name__ == "__main__":
    leave(main())
