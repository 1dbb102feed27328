"""`python -m pipeline.figures`."""

import sys

from pipeline.figures.command import main

if __name__ == "__main__":
    sys.exit(main())
