"""Offsets proven by content: what a token stands for is what its bytes become when normalised.

No library's report and no bookkeeping is trusted: each range of the text is normalised by itself
and held against its tokens. Tokens that share bytes are held against them together.
"""

from collections.abc import Iterator, Sequence

from pipeline.batches import Ranges
from pipeline.tokenization.normalization import Normalize, framed

_WHITE_SPACE = b" \t\n\x0b\x0c\r"


def find_unproven(
    byte_offsets: Ranges,
    contents: Sequence[bytes],
    text: bytes,
    normalize: Normalize,
    *,
    lost_bytes: bytes = b"",
    keeps_spaces: bool = True,
) -> list[int]:
    """Return the tokens whose bytes do not hold what the tokens stand for.

    Args:
        byte_offsets: [T, 2], ranges of `text`, none decreasing.
        contents: what each token stands for, b"" where that is not known.
        text: UTF-8 bytes.
        normalize: gives a string's normalised form.
        lost_bytes: bytes that the vocabulary lacks and leaves out.
        keeps_spaces: whether white space reaches the tokens; one space too many may stand before
            a token's own in any case.

    Example:
        >>> find_unproven(np.array([[0, 1]]), ["é".encode()], "e\u0301".encode(), nfc)
        [0]
    """
    rewrite = framed(normalize)
    ranges = byte_offsets.tolist()
    unproven: list[int] = []
    for first, stop in _runs(ranges):
        start, end = ranges[first][0], ranges[stop - 1][1]
        stands_for = contents[first:stop]
        if stop == first + 1 and stands_for[0] == text[start:end]:
            continue
        try:
            if rewrite is None or not _holds(
                rewrite(text[start:end].decode()).encode(), stands_for, lost_bytes, keeps_spaces
            ):
                unproven += range(first, stop)
        except ValueError:  # a range that divides a character, or can't be normalised by itself
            unproven += range(first, stop)
    return unproven


def _runs(ranges: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the runs of tokens that share bytes, each as its first token and where it stops."""
    first = 0
    for i in range(1, len(ranges) + 1):
        start, end = ranges[i - 1]
        if i == len(ranges) or ranges[i][0] >= end or start == end:
            yield first, i
            first = i


def _holds(
    normalized: bytes, contents: Sequence[bytes], lost_bytes: bytes, keeps_spaces: bool
) -> bool:
    normalized = normalized.translate(None, lost_bytes)
    if not keeps_spaces:
        normalized = normalized.translate(None, _WHITE_SPACE)
        contents = [content.translate(None, _WHITE_SPACE) for content in contents]
    if all(contents):
        joined = b"".join(contents)
        return joined in (normalized, b" " + normalized)
    place = 0  # unknown tokens may stand for anything between the known ones
    for content in filter(None, contents):
        found = normalized.find(content, place)
        if found < 0:
            found = normalized.find(content.removeprefix(b" "), place)
        if found < 0:
            return False
        place = found + len(content.removeprefix(b" "))
    return True
