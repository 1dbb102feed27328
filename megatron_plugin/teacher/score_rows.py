"""Pieces of documents packed into rows for a teacher, and its losses back to the documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.packing.kernels import fit_segments
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.interface import Line, line_of
from pipeline.scoring.sidecars import DocumentTokens

_WINDOW_PIECES = 8192
"""Pieces packed together: best fit looks at every open row."""


@dataclass(frozen=True)
class PackedPieces:
    """R rows of T places.

    Attributes:
        input_ids: int32 [R, T], 0 at padding.
        cu_seqlens: int32 [R, bounds], pieces' bounds, filled up with T.
        targets: int64 [R, T], where a place's token stands among the documents', -1 where its loss
            is not taken.
    """

    input_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    targets: NDArray[np.int64]


def pack_pieces(
    tokens: DocumentTokens, pieces: Pieces, rule: ContextRule, *, num_rows: int = 1
) -> PackedPieces:
    """Return all pieces in rows, longest first, by best fit; every token's loss in one place.

    Args:
        tokens: of the documents.
        pieces: of the same documents.
        rule: gives the length of a row and the context tokens.
        num_rows: empty rows make up a multiple of this, at least one.

    Example:
        >>> pack_pieces(tokens, rule.pieces(index), rule).input_ids.shape
        (12, 1984)
    """
    lines = [line_of(tokens, pieces, number, rule) for number in range(len(pieces))]
    seq_length = rule.teacher_seq_length
    row_of = _fit(np.array([len(line.input_ids) for line in lines], np.int64), seq_length)
    members: list[list[Line]] = [[] for _ in range(int(row_of.max(initial=-1)) + 1)]
    for line, row in zip(lines, row_of.tolist(), strict=True):
        members[row].append(line)
    members += [[]] * (-len(members) % num_rows if members else num_rows)
    input_ids = np.zeros((len(members), seq_length), np.int32)
    targets = np.full(input_ids.shape, -1, np.int64)
    most = max(map(len, members), default=0)
    cu_seqlens = np.full((len(members), most + 2), seq_length, np.int32)
    cu_seqlens[:, 0] = 0
    for row, own in enumerate(members):
        end = 0
        for number, line in enumerate(own, 1):
            start, end = end, end + len(line.input_ids)
            input_ids[row, start:end] = line.input_ids
            targets[row, start + line.places] = line.targets
            cu_seqlens[row, number] = end
    return PackedPieces(input_ids, cu_seqlens, targets)


def place_losses(
    losses: NDArray[np.float32], rows: PackedPieces, *, num_tokens: int
) -> NDArray[np.float32]:
    """Return the documents' losses, float32 [num_tokens], from the rows', float32 [R, T].

    Raises:
        ValueError: an infinite loss.
    """
    placed = np.full(num_tokens, np.nan, np.float32)
    taken = rows.targets >= 0
    placed[rows.targets[taken]] = losses[taken]
    if np.isinf(placed).any():
        raise ValueError(
            f"the teacher gave {int(np.isinf(placed).sum())} infinite losses: its dtype is too "
            "narrow (try --dtype float32), or its weights are damaged"
        )
    return placed


def _fit(lengths: NDArray[np.int64], seq_length: int) -> NDArray[np.int64]:
    """Return the row of each piece."""
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    for start in range(0, len(lengths), _WINDOW_PIECES):
        window = lengths[start : start + _WINDOW_PIECES]
        order = np.argsort(-window, kind="stable")
        rows = fit_segments(window[order], window[order], seq_length, seq_length)
        row_of[start + order] = rows + num_rows
        num_rows += int(rows.max()) + 1
    return row_of
