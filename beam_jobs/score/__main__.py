"""`python -m beam_jobs.score`."""

from beam_jobs.score.command import main
from vocag.command import leave

if __name__ == "__main__":
    leave(main())
