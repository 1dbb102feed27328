"""`python -m pipeline.training` is `vocag train`."""

import sys

from pipeline.training.command import main

if __name__ == "__main__":
    sys.exit(main())
