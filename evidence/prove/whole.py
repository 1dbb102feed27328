"""`vocag train` whose running teacher may be asked for its whole vocabulary.

    python evidence/prove/whole.py --top-k 49152 --data aligned --student model --method distill …

The product takes up to 255 tokens, as many as can be stored. All of them are a ceiling to compare
with, at [tokens, vocabulary] of memory.
"""

import sys

from pipeline.scoring import teaching
from pipeline.training.command import main

if __name__ == "__main__":
    teaching.MOST_ENTRIES = 1 << 20
    sys.exit(main(sys.argv[1:]))
