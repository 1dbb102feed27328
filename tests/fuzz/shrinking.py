"""What fails, made smaller for as long as it still fails."""

import time
from collections.abc import Callable, Sequence


def shrink_list[T](
    items: Sequence[T], fails: Callable[[list[T]], bool], *, until: float
) -> list[T]:
    """Return as few of the items as still fail, in their order: blocks leave, then single ones.

    Args:
        items: what fails together.
        fails: whether some of them still do.
        until: `time.monotonic` at which what has been reached is good enough.
    """
    kept, size = list(items), max(1, len(items) // 2)
    while size:
        place, left = 0, len(kept)
        while place < len(kept):
            if time.monotonic() >= until:
                return kept
            fewer = kept[:place] + kept[place + size :]
            if fails(fewer):
                kept = fewer
            else:
                place += size
        size = size // 2 if size > 1 or len(kept) == left else size
    return kept


def shrink_texts(
    texts: Sequence[str], fails: Callable[[list[str]], bool], *, until: float
) -> list[str]:
    """Return fewer and shorter texts that still fail."""
    kept = shrink_list(texts, lambda fewer: bool(fewer) and fails(fewer), until=until)
    for n in range(len(kept)):

        def fails_with(characters: list[str], n: int = n) -> bool:
            return fails([*kept[:n], "".join(characters), *kept[n + 1 :]])

        kept[n] = "".join(shrink_list(kept[n], fails_with, until=until))
    return kept
