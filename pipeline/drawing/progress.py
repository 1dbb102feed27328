"""A command's progress on stderr: a bar in a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from pipeline.drawing.formatting import format_count

LINE_SECONDS = 30.0
"""Between two lines."""


def watched[T](parts: Sequence[T], what: str, unit: str, *, each: int = 1) -> Iterator[T]:
    """Yield parts, of `each` units or fewer, and show how many are done."""
    if sys.stderr.isatty():
        yield from tqdm(parts, desc=what, unit=f" {unit}", unit_scale=each)
        return
    then = time.monotonic()
    for place, part in enumerate(parts):
        if time.monotonic() - then >= LINE_SECONDS:
            done, total = (format_count(count * each) for count in (place, len(parts)))
            print(f"{what}: {done} of {total} {unit}", file=sys.stderr, flush=True)
            then = time.monotonic()
        yield part
