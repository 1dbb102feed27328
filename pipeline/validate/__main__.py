"""`python -m pipeline.validate`."""

import sys

from pipeline.validate.command import main

if __name__ == "__main__":
    sys.exit(main())
