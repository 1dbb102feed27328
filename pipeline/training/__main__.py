"""`python -m pipeline.training` is `vocag train`."""

import sys

from vocag.command import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
