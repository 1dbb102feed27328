"""`python -m beam_jobs.score` is `vocag score`."""

import sys

from pipeline.command_line.commands import main

if __name__ == "__main__":
    main(["score", *sys.argv[1:]])
