"""Batches of aligned documents to samples: `schemas.document.encode_document`, many at once.

The bytes are the same (a test holds them side by side). Arrays are narrowed and written straight
into one buffer that already has the tar's layout, so that no step runs per document but the JSON
header, the two hashes and the CRC.
"""

import tarfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch, TokenBatch
from schemas.document import MEMBER_SUFFIX, document_key, sample_header

TAR_BLOCK = 512
"""Every tar header takes one block, every payload whole blocks."""

_FIELDS = (
    "student.input_ids",
    "student.token_bytes",
    "teacher.input_ids",
    "teacher.token_bytes",
    "span.advance",
    "span.width",
)
_OFFSET_FIELDS = {1: "student.byte_offsets", 3: "teacher.byte_offsets"}
_DTYPE_NAMES = {1: "U8", 2: "U16", 4: "U32"}


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """Tar members of a batch, ready to append to a shard.

    Attributes:
        members: uint8, headers, payloads and padding as they stand in a tar.
        keys: each sample's key.
        payload_offset: int64 [D], position of each payload in `members`.
        payload_bytes: int64 [D], size of each payload.
        crc32: int64 [D], of each payload.
    """

    members: NDArray[np.uint8]
    keys: list[str]
    payload_offset: NDArray[np.int64]
    payload_bytes: NDArray[np.int64]
    crc32: NDArray[np.int64]


def encode_batch(batch: AlignedBatch, *, keep_text: bool = False) -> EncodedBatch:
    """Encode every document of a batch as a tar member.

    Args:
        batch: aligned documents.
        keep_text: whether samples hold their text.

    Example:
        >>> encode_batch(batch).members.nbytes % 512
        0
    """
    headers, body_positions, item_sizes = _plan_samples(batch, keep_text=keep_text)
    texts = [document.text if keep_text else b"" for document in batch.documents]
    body_sizes = [int(p[-1]) for p in body_positions]
    payload_bytes = np.array(
        [len(h) + b + len(t) for h, b, t in zip(headers, body_sizes, texts, strict=True)], np.int64
    )
    blocks = TAR_BLOCK + -(-payload_bytes // TAR_BLOCK) * TAR_BLOCK
    payload_offset = np.cumsum(blocks) - blocks + TAR_BLOCK
    members = np.zeros(int(blocks.sum()), np.uint8)
    keys = [document_key(document.document_id) for document in batch.documents]
    _write_tar_headers(members, payload_offset, payload_bytes, keys)
    body_offset = payload_offset + [len(header) for header in headers]
    field_positions = np.array([p[:-1] for p in body_positions], np.int64).reshape(-1, len(_FIELDS))
    _write_bodies(
        members,
        field_positions + body_offset[:, None],
        item_sizes,
        *_arrays(batch.student),
        *_arrays(batch.teacher),
        batch.teacher_spans,
    )
    crc32 = _write_bytes_and_checksum(members, payload_offset, payload_bytes, headers, texts)
    return EncodedBatch(members, keys, payload_offset, payload_bytes, crc32)


def _plan_samples(
    batch: AlignedBatch, *, keep_text: bool
) -> tuple[list[bytes], list[tuple[int, ...]], NDArray[np.int64]]:
    """Return each sample's header, its fields' positions in the body (and the end), item sizes."""
    item_sizes = np.empty((len(batch.documents), len(_FIELDS)), np.int64)
    _measure_items(*_arrays(batch.student), *_arrays(batch.teacher), batch.teacher_spans, item_sizes)
    student_counts = np.diff(batch.student.cu_tokens).tolist()
    teacher_counts = np.diff(batch.teacher.cu_tokens).tolist()
    headers: list[bytes] = []
    positions: list[tuple[int, ...]] = []
    for d, (document, sizes) in enumerate(
        zip(batch.documents, map(tuple, item_sizes.tolist()), strict=True)
    ):
        tiles = bool(batch.student.tiles[d]), bool(batch.teacher.tiles[d])
        layout, places = _lay_out(sizes, tiles, student_counts[d], teacher_counts[d])
        if keep_text:
            layout = _with_text(layout, len(document.text))
        headers.append(
            sample_header(
                document.document_id,
                sha256(document.text).hexdigest(),
                len(document.text),
                layout,
            )
        )
        positions.append(places)
    return headers, positions, item_sizes


def _lay_out(
    sizes: tuple[int, ...], tiles: tuple[bool, bool], num_student: int, num_teacher: int
) -> tuple[list[tuple[str, str, tuple[int, ...], int]], tuple[int, ...]]:
    layout: list[tuple[str, str, tuple[int, ...], int]] = []
    places = [0] * (len(_FIELDS) + 1)
    position = 0
    for place, name, dtype, columns in _field_order(sizes, tiles):
        count = num_teacher if place in (2, 3) else num_student
        num_bytes = count * columns * sizes[place]
        layout.append((name, dtype, (count,) if columns == 1 else (count, columns), num_bytes))
        places[place] = position
        position += num_bytes
    places[-1] = position
    return layout, tuple(places)


@lru_cache(maxsize=4096)
def _field_order(
    sizes: tuple[int, ...], tiles: tuple[bool, bool]
) -> list[tuple[int, str, str, int]]:
    """Return (place in _FIELDS, name, dtype, columns) in file order: widest first, then by name."""
    entries = []
    for place, name in enumerate(_FIELDS):
        ragged = place in _OFFSET_FIELDS and not tiles[place // 2]
        name = _OFFSET_FIELDS[place] if ragged else name
        entries.append((place, name, _DTYPE_NAMES[sizes[place]], 2 if ragged else 1))
    return sorted(entries, key=lambda entry: (-sizes[entry[0]], entry[1]))


def _with_text(
    layout: list[tuple[str, str, tuple[int, ...], int]], num_bytes: int
) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return the layout with the text after all tensors: uint8, and its name sorts last."""
    return [*layout, ("text", "U8", (num_bytes,), num_bytes)]


def _arrays(
    tokens: TokenBatch,
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    return tokens.input_ids, tokens.byte_offsets, tokens.cu_tokens, tokens.tiles


def _write_tar_headers(
    members: NDArray[np.uint8],
    payload_offset: NDArray[np.int64],
    payload_bytes: NDArray[np.int64],
    keys: list[str],
) -> None:
    """Write each member's ustar header: regular file, mode 0644, no owner, no time."""
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
    """Return a ustar header with blanks where POSIX sums the checksum field as blanks."""
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
    texts: list[bytes],
) -> NDArray[np.int64]:
    view = memoryview(members)
    crc32 = np.empty(len(headers), np.int64)
    for d, (start, size) in enumerate(
        zip(payload_offset.tolist(), payload_bytes.tolist(), strict=True)
    ):
        view[start : start + len(headers[d])] = headers[d]
        end = start + size
        if texts[d]:
            view[end - len(texts[d]) : end] = texts[d]
        crc32[d] = zlib.crc32(view[start:end])
    return crc32


@njit(cache=True, nogil=True)
def _item_size(high: int) -> int:
    return 1 if high < 1 << 8 else 2 if high < 1 << 16 else 4


@njit(cache=True, nogil=True)
def _measure_items(
    student_ids: NDArray[np.uint32],
    student_offsets: NDArray[np.int64],
    student_cu: NDArray[np.int64],
    student_tiles: NDArray[np.bool_],
    teacher_ids: NDArray[np.uint32],
    teacher_offsets: NDArray[np.int64],
    teacher_cu: NDArray[np.int64],
    teacher_tiles: NDArray[np.bool_],
    teacher_spans: NDArray[np.int64],
    item_sizes: NDArray[np.int64],
) -> None:
    """Find the narrowest item size of each of the six tensors of each document."""
    for d in range(len(student_cu) - 1):
        high_id = high_bytes = high_advance = high_width = np.int64(0)
        previous = np.int64(0)
        for i in range(student_cu[d], student_cu[d + 1]):
            start, end = student_offsets[i, 0], student_offsets[i, 1]
            high_id = max(high_id, np.int64(student_ids[i]))
            high_bytes = max(high_bytes, end - start if student_tiles[d] else end)
            high_advance = max(high_advance, teacher_spans[i, 0] - previous)
            high_width = max(high_width, teacher_spans[i, 1] - teacher_spans[i, 0])
            previous = teacher_spans[i, 0]
        item_sizes[d, 0], item_sizes[d, 1] = _item_size(high_id), _item_size(high_bytes)
        item_sizes[d, 4], item_sizes[d, 5] = _item_size(high_advance), _item_size(high_width)
        high_id = high_bytes = np.int64(0)
        for i in range(teacher_cu[d], teacher_cu[d + 1]):
            start, end = teacher_offsets[i, 0], teacher_offsets[i, 1]
            high_id = max(high_id, np.int64(teacher_ids[i]))
            high_bytes = max(high_bytes, end - start if teacher_tiles[d] else end)
        item_sizes[d, 2], item_sizes[d, 3] = _item_size(high_id), _item_size(high_bytes)


@njit(cache=True, nogil=True)
def _put(out: NDArray[np.uint8], position: int, value: int, size: int) -> int:
    """Write an unsigned little-endian number; return the position after it."""
    out[position] = value & 0xFF
    if size > 1:
        out[position + 1] = (value >> 8) & 0xFF
    if size > 2:
        out[position + 2] = (value >> 16) & 0xFF
        out[position + 3] = (value >> 24) & 0xFF
    return position + size


@njit(cache=True, nogil=True)
def _write_tokens(
    out: NDArray[np.uint8],
    ids_position: int,
    bytes_position: int,
    id_size: int,
    bytes_size: int,
    input_ids: NDArray[np.uint32],
    byte_offsets: NDArray[np.int64],
    tiles: bool,
) -> None:
    for i in range(len(input_ids)):
        ids_position = _put(out, ids_position, np.int64(input_ids[i]), id_size)
        start, end = byte_offsets[i, 0], byte_offsets[i, 1]
        if tiles:
            bytes_position = _put(out, bytes_position, end - start, bytes_size)
        else:
            bytes_position = _put(out, bytes_position, start, bytes_size)
            bytes_position = _put(out, bytes_position, end, bytes_size)


@njit(cache=True, nogil=True)
def _write_bodies(
    out: NDArray[np.uint8],
    positions: NDArray[np.int64],
    item_sizes: NDArray[np.int64],
    student_ids: NDArray[np.uint32],
    student_offsets: NDArray[np.int64],
    student_cu: NDArray[np.int64],
    student_tiles: NDArray[np.bool_],
    teacher_ids: NDArray[np.uint32],
    teacher_offsets: NDArray[np.int64],
    teacher_cu: NDArray[np.int64],
    teacher_tiles: NDArray[np.bool_],
    teacher_spans: NDArray[np.int64],
) -> None:
    """Write the six tensors of each document, positions int64 [D, 6] in `out`."""
    for d in range(len(student_cu) - 1):
        first, last = student_cu[d], student_cu[d + 1]
        p, s = positions[d], item_sizes[d]
        _write_tokens(
            out, p[0], p[1], s[0], s[1],
            student_ids[first:last], student_offsets[first:last], student_tiles[d],
        )  # fmt: skip
        begin, end = teacher_cu[d], teacher_cu[d + 1]
        _write_tokens(
            out, p[2], p[3], s[2], s[3],
            teacher_ids[begin:end], teacher_offsets[begin:end], teacher_tiles[d],
        )  # fmt: skip
        advance_position, width_position = p[4], p[5]
        previous = np.int64(0)
        for i in range(first, last):
            start, stop = teacher_spans[i, 0], teacher_spans[i, 1]
            advance_position = _put(out, advance_position, start - previous, s[4])
            width_position = _put(out, width_position, stop - start, s[5])
            previous = start
