"""Apache Beam commands that make and enrich aligned datasets."""

import atexit
import gc

from vocag_cli import require_own_packages

require_own_packages()  # Beam's workers import this first, and it imports `pipeline` next

# Python's last collections would look at every object of Beam and of two vocabularies: 0.7 s at
# the end of each process, and whoever started workers waits for theirs.
atexit.register(gc.freeze)
