"""Offsets as tokenizers report them, made exact: in bytes, overlaps and gaps mended.

What the reference libraries report is right for most tokens and wrong in known ways: the pieces of
one character all claim the whole character, and SentencePiece's dummy prefix claims the first
character. Reports are mended *cluster* by cluster: a run of tokens whose reported ranges overlap or
share a start. What a normaliser rewrote is `pipeline.tokenization.normalization`'s matter.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def byte_positions(text: str) -> NDArray[np.int64]:
    """Return the byte position of each character and of the end, int64 [len(text) + 1].

    Example:
        >>> byte_positions("aé").tolist()
        [0, 1, 3]
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def mend_offsets(
    reported: NDArray[np.int64], text: bytes, contents: Sequence[bytes]
) -> NDArray[np.int64]:
    r"""Return byte offsets from reported ones, told apart where the text says how.

    - Tokens of a cluster that spell it are laid side by side.
    - One byte too many, where the first token starts with a space, is a dummy prefix: it covers
      no byte.
    - Other tokens keep their overlapping ranges, empty ones cover the whole cluster.

    Args:
        reported: int64 [T, 2], byte ranges, none decreasing.
        text: the text's UTF-8 bytes.
        contents: what each token stands for; b"" where that is not known.

    Returns:
        int64 [T, 2], byte ranges; tokens may overlap or leave text uncovered.

    Example:
        >>> mend_offsets(np.array([[0, 2], [0, 2]]), "é".encode(), [b"\xc3", b"\xa9"])
        array([[0, 1],
               [1, 2]])
    """
    offsets = reported.copy()
    if len(offsets) == 0:
        return offsets
    new = (offsets[1:, 0] >= offsets[:-1, 1]) & (offsets[1:, 0] > offsets[:-1, 0])
    firsts = np.flatnonzero(np.concatenate([[True], new]))
    stops = np.append(firsts[1:], len(offsets))
    for c in np.flatnonzero(stops - firsts > 1).tolist():
        cluster = offsets[firsts[c] : stops[c]]
        start, end = int(cluster[0, 0]), int(cluster[-1, 1])
        _lay_out(cluster, start, end, text, contents[firsts[c] : stops[c]])
    return offsets


def _lay_out(
    cluster: NDArray[np.int64], start: int, end: int, text: bytes, contents: Sequence[bytes]
) -> None:
    """Write a cluster's ranges, in place, so that they cover `start` to `end`."""
    spelled, covered = b"".join(contents), text[start:end]
    if all(contents) and spelled in (covered, b" " + covered):
        token_ends = end - len(spelled) + np.cumsum([len(content) for content in contents])
        cluster[1:, 0] = token_ends[:-1]
        cluster[0, 0], cluster[:, 1] = start, token_ends
    elif np.any(cluster[:, 0] == cluster[:, 1]):
        cluster[:] = (start, end)
