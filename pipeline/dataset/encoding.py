"""Encode aligned documents as samples for `schemas.document.decode_document`.

Arrays go narrowed into one buffer with the tar's layout.
"""

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch, ChatParts, PerDocument, Ranges
from pipeline.compiled import compiled
from schemas.document import MEMBER_SUFFIX, Layout, document_key, sample_header

TAR_BLOCK = 512
"""A tar header takes one block, a payload whole blocks."""

_DTYPE_NAMES = {1: "U8", 2: "U16", 4: "U32"}


@dataclass(frozen=True, eq=False)
class _Field:
    """A tensor of a batch, uint32: `values[starts[d]:starts[d + 1]]` for document d."""

    name: str
    values: NDArray[np.uint32]
    starts: NDArray[np.int64]
    item_sizes: NDArray[np.int64]
    columns: int = 1


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """Tar members of D documents, ready to append to a shard.

    `members` are uint8 headers, payloads and padding; the other arrays int64 [D], positions in
    bytes.
    """

    members: NDArray[np.uint8]
    keys: list[str]
    payload_offset: NDArray[np.int64]
    payload_bytes: NDArray[np.int64]
    crc32: NDArray[np.int64]


def encode_batch(batch: AlignedBatch, *, keep_text: bool = False) -> EncodedBatch:
    """Encode every document of a batch as a tar member."""
    texts = [document.text if keep_text else None for document in batch.documents]
    fields = _fields(batch)
    headers, positions, payload_bytes = _plan_samples(batch, fields, texts)
    blocks = TAR_BLOCK + -(-payload_bytes // TAR_BLOCK) * TAR_BLOCK
    payload_offset = np.cumsum(blocks) - blocks + TAR_BLOCK
    members = np.zeros(int(blocks.sum()), np.uint8)
    keys = [document_key(document.document_id) for document in batch.documents]
    _write_tar_headers(members, payload_offset, payload_bytes, keys)
    for place in range(len(fields)):
        field = fields.pop(0)  # its numbers leave memory while the pages of `members` fill
        _write_field(
            out8=members,
            out16=members.view(np.uint16),
            out32=members.view(np.uint32),
            positions=positions[:, place] + payload_offset,
            item_sizes=field.item_sizes,
            values=field.values,
            starts=field.starts,
        )
    crc32 = _write_bytes_and_checksum(members, payload_offset, payload_bytes, headers, texts)
    return EncodedBatch(members, keys, payload_offset, payload_bytes, crc32)


def _fields(batch: AlignedBatch) -> list[_Field]:
    fields: list[_Field] = []

    def add(
        name: str,
        values: NDArray[Any],
        starts: NDArray[np.int64],
        held: Any = True,
        columns: int = 1,
    ) -> None:
        numbers = values.astype(f"{values.dtype.kind}4", copy=False).view(np.uint32)
        sizes = _narrowest(numbers, starts) * held
        fields.append(_Field(name, numbers, starts, sizes, columns))

    for side, tokens in (("student", batch.student), ("teacher", batch.teacher)):
        cu_tokens, tiles = tokens.cu_tokens, tokens.tiles
        add(f"{side}.input_ids", tokens.input_ids, cu_tokens)
        add(f"{side}.token_bytes", _widths(tokens.byte_offsets), cu_tokens, tiles)
        if not tiles.all():
            flat = tokens.byte_offsets.reshape(-1)
            add(f"{side}.byte_offsets", flat, 2 * cu_tokens, ~tiles, columns=2)
    cu_tokens = batch.student.cu_tokens
    add("span.advance", _advances(batch.teacher_spans, cu_tokens), cu_tokens)
    add("span.width", _widths(batch.teacher_spans), cu_tokens)
    if batch.chats is not None:
        for name, (values, cu) in _chat_tensors(batch.chats):
            columns = values.shape[1] if values.ndim == 2 else 1
            add(name, values.reshape(-1), columns * cu, columns=columns)
    return sorted(fields, key=lambda field: field.name)


def _chat_tensors(chats: ChatParts) -> Iterator[tuple[str, PerDocument]]:
    yield "chat.learned", chats.learned
    yield "chat.messages", chats.messages
    for side, own in (("student", chats.student), ("teacher", chats.teacher)):
        yield f"{side}.learned", own.learned
        yield f"{side}.own_text", own.own_text
        yield f"{side}.pieces", own.pieces


def _plan_samples(
    batch: AlignedBatch, fields: list[_Field], texts: list[bytes | None]
) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64]]:
    """Return headers, fields' positions in payloads, [D, fields], and payload sizes."""
    names, columns = zip(*((field.name, field.columns) for field in fields), strict=True)
    item_sizes = np.stack([field.item_sizes for field in fields], axis=1)
    counts = np.stack([np.diff(field.starts) for field in fields], axis=1)
    order = np.argsort(-item_sizes, axis=1, kind="stable")  # fields come by name
    num_bytes = np.take_along_axis(counts * item_sizes, order, axis=1)
    ends = np.cumsum(num_bytes, axis=1)
    lengths = np.take_along_axis(counts // columns, order, axis=1)
    places = (
        np.stack([lengths, ends - num_bytes, ends], axis=2)
        .reshape(len(ends), 3 * len(fields))
        .tolist()
    )
    headers: list[bytes] = []
    for document, text, sizes, own, end in zip(
        batch.documents, texts, item_sizes.tolist(), places, ends[:, -1].tolist(), strict=True
    ):
        layout = _layout(names, columns, tuple(sizes))
        own = own[: 3 * len(layout)]
        if text is not None:
            layout, own = (*layout, ("text", "U8", 1)), [*own, len(text), end, end + len(text)]
        text_sha256 = sha256(document.text).hexdigest()
        header = sample_header(document.document_id, text_sha256, len(document.text), layout, own)
        headers.append(header)
    header_bytes = np.array([len(header) for header in headers], np.int64)
    text_bytes = np.array([len(text or b"") for text in texts], np.int64)
    positions = np.empty_like(ends)
    np.put_along_axis(positions, order, ends - num_bytes + header_bytes[:, None], axis=1)
    return headers, positions, header_bytes + ends[:, -1] + text_bytes


@lru_cache(maxsize=4096)
def _layout(names: tuple[str, ...], columns: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    """Lay out the fields present, widest first, then by name."""
    present = [entry for entry in zip(sizes, names, columns, strict=True) if entry[0]]
    present.sort(key=lambda entry: (-entry[0], entry[1]))
    return tuple((name, _DTYPE_NAMES[size], width) for size, name, width in present)


def _write_tar_headers(
    members: NDArray[np.uint8],
    payload_offset: NDArray[np.int64],
    payload_bytes: NDArray[np.int64],
    keys: list[str],
) -> None:
    names = np.array([f"{key}{MEMBER_SUFFIX}" for key in keys], "S44")
    headers = np.tile(_tar_header_template(), (len(keys), 1))
    headers[:, :44] = names.view(np.uint8).reshape(-1, 44)
    sizes = np.array([f"{size:011o}" for size in payload_bytes.tolist()], "S11")
    headers[:, 124:135] = sizes.view(np.uint8).reshape(-1, 11)
    sums = headers.sum(axis=1, dtype=np.int64)
    checksums = np.array([f"{total:06o}" for total in sums.tolist()], "S6")
    headers[:, 148:154] = checksums.view(np.uint8).reshape(-1, 6)
    headers[:, 154] = 0
    for row, start in zip(headers, payload_offset.tolist(), strict=True):
        members[start - TAR_BLOCK : start] = row


@lru_cache(maxsize=1)
def _tar_header_template() -> NDArray[np.uint8]:
    """A header with a blank checksum."""
    member = tarfile.TarInfo()
    member.mode = 0o644
    header = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    header[148:156] = b" " * 8
    return np.frombuffer(bytes(header), np.uint8)


def _write_bytes_and_checksum(
    members: NDArray[np.uint8],
    payload_offset: NDArray[np.int64],
    payload_bytes: NDArray[np.int64],
    headers: list[bytes],
    texts: list[bytes | None],
) -> NDArray[np.int64]:
    view = memoryview(members)
    crc32 = np.empty(len(headers), np.int64)
    for d, (start, size) in enumerate(
        zip(payload_offset.tolist(), payload_bytes.tolist(), strict=True)
    ):
        view[start : start + len(headers[d])] = headers[d]
        end = start + size
        text = texts[d]
        if text:
            view[end - len(text) : end] = text
        crc32[d] = zlib.crc32(view[start:end])
    return crc32


def _narrowest(values: NDArray[np.uint32], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes for each document's largest value: 1, 2 or 4."""
    highs = np.zeros(len(starts) - 1, np.int64)
    filled = np.diff(starts) > 0
    highs[filled] = np.maximum.reduceat(values, starts[:-1][filled])
    return 1 + (highs >= 1 << 8) + 2 * (highs >= 1 << 16)


def _widths(ranges: Ranges) -> Ranges:
    return ranges[:, 1] - ranges[:, 0]


def _advances(spans: Ranges, cu_tokens: NDArray[np.int64]) -> Ranges:
    """Each span's start, relative to the previous one's."""
    starts = spans[:, 0]
    advances = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=advances[1:])
    firsts = cu_tokens[:-1][np.diff(cu_tokens) > 0]
    advances[firsts] = starts[firsts]
    return advances


@compiled
def _write_field(
    out8: NDArray[np.uint8],
    out16: NDArray[np.uint16],
    out32: NDArray[np.uint32],
    positions: NDArray[np.int64],
    item_sizes: NDArray[np.int64],
    values: NDArray[np.uint32],
    starts: NDArray[np.int64],
) -> None:
    """Write one field of each document, narrowed, to views of one buffer.

    Headers are padded and wider fields come first, so positions are aligned.
    """
    for d in range(len(positions)):
        own = values[starts[d] : starts[d + 1]]
        if item_sizes[d] == 1:
            first = positions[d]
            _copy(own, out8[first : first + len(own)])
        elif item_sizes[d] == 2:
            first = positions[d] // 2
            _copy(own, out16[first : first + len(own)])
        elif item_sizes[d] == 4:
            first = positions[d] // 4
            _copy(own, out32[first : first + len(own)])


@compiled
def _copy(values: NDArray[np.uint32], out: NDArray[Any]) -> None:
    """Copy with truncation; slices indexed from 0 allow vector instructions."""
    for i in range(len(out)):
        out[i] = values[i]
