"""Batches of aligned documents to a view's payloads: `schemas.view_file.encode_view`, many at once.

The bytes are the same (a test holds them side by side).
"""

import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch, TokenBatch
from pipeline.compiled import compiled
from pipeline.dataset.encoding import range_advances, range_widths
from schemas.view_file import NUM_COLUMNS, PAYLOAD_HEADER, Side


@dataclass(frozen=True, eq=False)
class EncodedViews:
    """The payloads of D documents.

    Attributes:
        data: uint8, one behind another.
        payload_bytes: int64 [D].
        crc32: int64 [D].
    """

    data: NDArray[np.uint8]
    payload_bytes: NDArray[np.int64]
    crc32: NDArray[np.int64]


def encode_views(batch: AlignedBatch, side: Side) -> EncodedViews:
    """Encode one side of a batch's documents, and their spans.

    Example:
        >>> encode_views(batch, "teacher").payload_bytes.tolist()
        [40, 318]
    """
    tokens: TokenBatch = getattr(batch, side)
    cu_tokens, cu_student = tokens.cu_tokens, batch.student.cu_tokens
    # What tiles needs no starts; the column is empty there.
    cu_gaps = np.cumsum(np.concatenate([[0], np.where(tokens.tiles, 0, np.diff(cu_tokens))]))
    gaps = np.empty(0, np.uint32)
    if cu_gaps[-1]:
        advances = range_advances(tokens.byte_offsets, cu_tokens)[0]
        gaps = advances[np.repeat(~tokens.tiles, np.diff(cu_tokens))]
    columns = (
        (tokens.input_ids, cu_tokens),
        (range_widths(tokens.byte_offsets, cu_tokens)[0], cu_tokens),
        (gaps, cu_gaps.astype(np.int64)),
        (range_advances(batch.teacher_spans, cu_student)[0], cu_student),
        (range_widths(batch.teacher_spans, cu_student)[0], cu_student),
    )
    bits = np.stack([_bits_needed(values, starts) for values, starts in columns], axis=1)
    counts = np.stack([np.diff(starts) for _, starts in columns], axis=1)
    column_bytes = (bits * counts + 7) // 8
    payload_bytes = PAYLOAD_HEADER + column_bytes.sum(axis=1)
    starts = np.cumsum(payload_bytes) - payload_bytes
    data = np.zeros(int(payload_bytes.sum()), np.uint8)
    data[starts] = tokens.tiles
    data[starts[:, None] + 1 + np.arange(NUM_COLUMNS)] = bits
    places = starts[:, None] + PAYLOAD_HEADER + np.cumsum(column_bytes, axis=1) - column_bytes
    for column, (values, cu_values) in enumerate(columns):
        _pack(data, places[:, column], bits[:, column], values, cu_values)
    view = memoryview(data)
    ends = [*starts.tolist(), len(data)]
    crc32 = [zlib.crc32(view[start:stop]) for start, stop in pairwise(ends)]
    return EncodedViews(data, payload_bytes, np.array(crc32, np.int64))


@compiled
def unpack(data: NDArray[np.uint8], first: int, bits: int, out: NDArray[np.uint32]) -> int:
    """Read numbers of so many bits each, from a byte on; return the first byte behind them."""
    word, num_bits, place = np.uint64(0), 0, first
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(len(out)):
        while num_bits < bits:
            word |= np.uint64(data[place]) << np.uint64(num_bits)
            place += 1
            num_bits += 8
        out[i] = word & mask
        word >>= np.uint64(bits)
        num_bits -= bits
    return place


@compiled
def _bits_needed(values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bits that the largest value of each document needs."""
    bits = np.zeros(len(starts) - 1, np.int64)
    for d in range(len(bits)):
        own = values[starts[d] : starts[d + 1]]
        high = np.int64(0)
        for i in range(len(own)):
            high = max(high, np.int64(own[i]))
        while high >> bits[d]:
            bits[d] += 1
    return bits


@compiled
def _pack(
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
    bits: NDArray[np.int64],
    values: NDArray[Any],
    starts: NDArray[np.int64],
) -> None:
    """Write one column of each document at its byte."""
    for d in range(len(places)):
        own = values[starts[d] : starts[d + 1]]
        word, num_bits, place = np.uint64(0), 0, places[d]
        for i in range(len(own)):
            word |= np.uint64(own[i]) << np.uint64(num_bits)
            num_bits += bits[d]
            while num_bits >= 8:
                out[place] = word & np.uint64(0xFF)
                word >>= np.uint64(8)
                place += 1
                num_bits -= 8
        if num_bits:
            out[place] = word & np.uint64(0xFF)
