"""`python -m pipeline.evaluation`."""

import sys

from pipeline.evaluation.command import main

sys.exit(main())
