"""Pieces of documents to batches of nearly equal length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.interface import line_of
from pipeline.scoring.sidecars import DocumentTokens

MAX_PADDING = 0.05
"""Share of a batch's places that may be padding."""


def plan_batches(lengths: NDArray[np.int64], batch_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield the pieces of each batch, longest first; each piece once.

    A batch ends if one more piece would exceed `batch_tokens` places, padding included, or push
    its padding above `MAX_PADDING`.

    Args:
        lengths: int64 [P], places of each piece.
        batch_tokens: places per batch.

    Example:
        >>> [batch.tolist() for batch in plan_batches(np.array([3, 100, 98, 3]), 1000)]
        [[1, 2], [0, 3]]
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    totals = np.concatenate([[0], np.cumsum(sorted_lengths)])
    start = 0
    while start < len(order):
        longest = int(sorted_lengths[start])
        stop = min(len(order), start + max(1, batch_tokens // max(longest, 1)))
        places = longest * np.arange(1, stop - start + 1)
        used = totals[start + 1 : stop + 1] - totals[start]
        # Padding grows with every piece, so the first that is too much ends the batch.
        num_fitting = int(np.searchsorted(places - used > MAX_PADDING * places, True))
        stop = start + max(1, min(num_fitting, stop - start))
        yield order[start:stop]
        start = stop


@dataclass(frozen=True)
class PieceBatch:
    """A batch of pieces.

    Attributes:
        input_ids: int64 [b, l], 0 after the end.
        lengths: int64 [b].
        places: int64 [n], flat places of the tokens whose losses are taken.
        targets: int64 [n], where those tokens are among the documents'.
        positions: int64 [n + e], where what is expected in those tokens' place is among the
            documents' positions, and then what is expected after the e documents that end here.
        ends: int64 [e], flat places of those documents' last tokens.
    """

    input_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    ends: NDArray[np.int64]


def make_batch(
    tokens: DocumentTokens, pieces: Pieces, numbers: NDArray[np.int64], rule: ContextRule
) -> PieceBatch:
    """Return some pieces as the rectangle that a model reads.

    Args:
        tokens: of the documents.
        pieces: all of them.
        numbers: int64 [b], which pieces.
        rule: what comes before each.
    """
    lines = [line_of(tokens, pieces, number, rule) for number in numbers.tolist()]
    lengths = np.array([len(line.input_ids) for line in lines], np.int64)
    input_ids = np.zeros((len(lines), int(lengths.max())), np.int64)
    places, ends, after = [], [], []
    for row, line in enumerate(lines):
        input_ids[row, : len(line.input_ids)] = line.input_ids
        places.append(line.places + row * input_ids.shape[1])
        if len(line.positions) > len(line.targets):
            ends.append(len(line.input_ids) - 1 + row * input_ids.shape[1])
            after.append(line.positions[-1:])
    return PieceBatch(
        input_ids,
        lengths,
        np.concatenate(places),
        np.concatenate([line.targets for line in lines]),
        np.concatenate([*(line.positions[: len(line.targets)] for line in lines), *after]),
        np.array(ends, np.int64),
    )
