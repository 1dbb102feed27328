"""`python -m beam_jobs.align`."""

from beam_jobs.align.command import main
from vocag_cli import leave

if __name__ == "__main__":
    leave(main())
