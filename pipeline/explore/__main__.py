"""`python -m pipeline.explore`."""

import sys

from pipeline.explore.command import main

if __name__ == "__main__":
    sys.exit(main())
