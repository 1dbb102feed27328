"""`python -m pipeline.training` is `vocag train`."""

import sys

from pipeline.command_line.commands import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
