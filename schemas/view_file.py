"""One document's tokens of a view as bytes, and back: `SHARD.view-NAME.bin` holds them end to end.

A view replaces one side of the documents of a dataset, teacher or student. Of that side it holds
ids and offsets, and of the pair that results the spans. Every column takes the bits that its
largest value needs: an id of a vocabulary of 152,000 takes 18. `schemas/README.md` specifies it.
"""

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from schemas.document import (
    AlignedDocument,
    Tokens,
    check_document,
    decode_spans,
    span_columns,
    tiles_text,
)
from schemas.errors import DamagedSampleError

Side = Literal["student", "teacher"]

VIEW_MAGIC: Final = b"VOCAGVW\x01"
"""The first bytes of a view's file; the last one is its version."""

NUM_COLUMNS: Final = 5
"""ids, token bytes, byte advances, span advances, span widths."""

PAYLOAD_HEADER: Final = 1 + NUM_COLUMNS
"""Bytes before the columns: whether tokens tile the text, and the bits of each column's values."""

MAX_BITS: Final = 32


def view_file_names(shard: str, view: str) -> tuple[str, str]:
    """Return the names of a shard's two files of a view.

    Example:
        >>> view_file_names("c-000000-of-000001.tar", "qwen")
        ('c-000000-of-000001.view-qwen.bin', 'c-000000-of-000001.view-qwen.parquet')
    """
    stem = f"{shard.removesuffix('.tar')}.view-{view}"
    return f"{stem}.bin", f"{stem}.parquet"


def encode_view(document: AlignedDocument, side: Side) -> bytes:
    """Return a document's tokens of one side, and its spans.

    This is the obvious encoder; `pipeline.dataset.view_encoding` writes whole batches to the same
    bytes.

    Raises:
        ValueError: a value is negative, too large for 32 bits, or not monotone.

    Example:
        >>> decode_view(encode_view(document, "teacher"), document, "teacher", 5)
        AlignedDocument(document_id='doc-1', ...)
    """
    tokens: Tokens = getattr(document, side)
    starts, ends = tokens.byte_offsets[:, 0], tokens.byte_offsets[:, 1]
    tiles = tiles_text(tokens.byte_offsets, document.num_text_bytes)
    advances = np.zeros(0, np.int64) if tiles else np.diff(starts, prepend=0)
    columns = [tokens.input_ids, ends - starts, advances, *span_columns(document.teacher_spans)]
    bits = [_bits_needed(column) for column in columns]
    return bytes([tiles, *bits]) + b"".join(map(pack_bits, columns, bits))


def decode_view(
    payload: bytes | memoryview, document: AlignedDocument, side: Side, num_tokens: int
) -> AlignedDocument:
    """Return a document with the tokens of one side, and the spans, that a view holds.

    Args:
        payload: the view's bytes of this document.
        document: as the shard holds it.
        side: which one the view replaces.
        num_tokens: of that side, as the view's index says.

    Raises:
        DamagedSampleError: the bytes are no such payload, or contradict the document.
    """
    try:
        tiles, columns = _split(payload, document, side, num_tokens)
        ids, lengths, advances, span_advances, span_widths = columns
        starts = np.cumsum(lengths) - lengths if tiles else np.cumsum(advances)
        if tiles and int(lengths.sum()) != document.num_text_bytes:
            raise ValueError(f"tokens cover {lengths.sum()} of {document.num_text_bytes} bytes")
        tokens = Tokens(ids, np.stack([starts, starts + lengths], axis=1))
        spans = decode_spans(span_advances, span_widths)
    except ValueError as error:
        raise DamagedSampleError(
            f'the view\'s bytes of document "{document.document_id}" are unreadable ({error}): '
            "restore the view, or remove and make it again"
        ) from error
    sides = {"student": document.student, "teacher": document.teacher, side: tokens}
    seen = AlignedDocument(
        document_id=document.document_id,
        text_sha256=document.text_sha256,
        num_text_bytes=document.num_text_bytes,
        teacher_spans=spans,
        text=document.text,
        **sides,
    )
    check_document(seen)
    return seen


def pack_bits(values: NDArray[Any], bits: int) -> bytes:
    """Return numbers side by side, each in so many bits, the lowest first; bytes are filled up.

    Example:
        >>> pack_bits(np.array([1, 2, 3]), 2).hex()
        '39'
    """
    each = values.astype(np.uint64)[:, None] >> np.arange(bits, dtype=np.uint64) & np.uint64(1)
    return np.packbits(each.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack_bits(data: bytes | memoryview, bits: int, count: int) -> NDArray[np.int64]:
    """Return what `pack_bits` wrote, int64 [count]."""
    each = np.unpackbits(np.frombuffer(data, np.uint8), count=bits * count, bitorder="little")
    weights = np.int64(1) << np.arange(bits, dtype=np.int64)
    return each.reshape(count, bits).astype(np.int64) @ weights


def _split(
    payload: bytes | memoryview, document: AlignedDocument, side: Side, num_tokens: int
) -> tuple[bool, list[NDArray[np.int64]]]:
    if len(payload) < PAYLOAD_HEADER:
        raise ValueError(f"{len(payload)} bytes are no header")
    tiles, *widths = payload[:PAYLOAD_HEADER]
    if tiles > 1 or max(widths) > MAX_BITS:
        raise ValueError(f"its header is {bytes(payload[:PAYLOAD_HEADER]).hex()}")
    num_student = num_tokens if side == "student" else len(document.student)
    counts = (num_tokens, num_tokens, 0 if tiles else num_tokens, num_student, num_student)
    start, columns = PAYLOAD_HEADER, []
    for bits, count in zip(widths, counts, strict=True):
        stop = start + (bits * count + 7) // 8
        if stop > len(payload):
            raise ValueError(f"it ends at byte {len(payload)}, a column at byte {stop}")
        columns.append(unpack_bits(payload[start:stop], bits, count))
        start = stop
    if start != len(payload):
        raise ValueError(f"it has {len(payload)} bytes, its columns {start}")
    return bool(tiles), columns


def _bits_needed(values: NDArray[np.int64]) -> int:
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0 or high >> MAX_BITS:
        raise ValueError(f"a view can't hold {low if low < 0 else high}, which is no uint32")
    return high.bit_length()
