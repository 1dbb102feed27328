"""An index's cut points, decoded from parquet's pages four times as fast as pyarrow does.

They are nine tenths of an index and of the time that planning takes. pyarrow spends most of it on
where lists begin and which values are missing, for each value; here runs of these are taken whole.
Only the layout that we write is read: pages of version 1, zstd, DELTA_BINARY_PACKED, no value
missing. Whatever is laid out otherwise is left to pyarrow, which reads it or says what is wrong.

Source: https://parquet.apache.org/docs/file-format/data-pages/encodings (encodings 3 and 5) and
the Thrift compact protocol, in which page headers are written.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.compiled import compiled

_CUTS = ("cut_student", "cut_teacher")
_DATA_PAGE, _RLE, _DELTA_BINARY_PACKED = 0, 3, 5
_ELEMENT, _EMPTY_LIST = 2, 1
"""Definition levels: a value stands here, or a list without one; 0 is a missing list."""

_WORD_BYTES = 8


class _OtherLayoutError(Exception):
    """Pages that only pyarrow can judge."""


class Scratch:
    """Memory that is used again for one index after another, by one thread at a time.

    Made anew for each, it would cost more than what is written to it: the system clears its pages.
    """

    def __init__(self) -> None:
        """Begin with none; it grows to what one index takes."""
        self._memory, self._taken = np.empty(0, np.uint8), 0

    def clear(self) -> None:
        """Forget what was taken: it is written over from now on."""
        if self._taken > len(self._memory):
            self._memory = np.empty(self._taken, np.uint8)
        self._taken = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [num_bytes], not cleared, from a multiple of 64 bytes on."""
        start = self._taken
        self._taken += -(-num_bytes // 64) * 64
        if self._taken > len(self._memory):
            return np.empty(num_bytes, np.uint8)
        return self._memory[start : start + num_bytes]


class _Page(NamedTuple):
    """A data page, decompressed.

    Attributes:
        data: uint8 [bytes + padding], padded to whole words and one more.
        num_bytes: of the page.
        num_levels: its values, and its lists without one.
    """

    data: NDArray[np.uint8]
    num_bytes: int
    num_levels: int


_Known = dict[tuple[int, bytes], tuple[NDArray[np.int64], int]]
"""Where lists start and how many values they have, by what pages say of it."""

_Take = Callable[[int], NDArray[np.uint8]]
"""Returns so many bytes to write to, see `Scratch.take`."""


def read_cut_columns(
    data: bytes, file: pq.FileMetaData, scratch: Scratch | None = None
) -> dict[str, NDArray[np.integer]] | None:
    """Return an index's cut points, None where its pages are laid out as we never write them.

    Args:
        data: the parquet file.
        file: what its footer says.
        scratch: where cut points lie until it is cleared; None: for good.

    Returns:
        `cut_starts`, `cut_student` and `cut_teacher`, as in `schemas.index.ShardIndex`.

    Example:
        >>> read_cut_columns(data, pq.ParquetFile(pa.BufferReader(data)).metadata)["cut_student"]
        array([15, 19], dtype=uint32)
    """
    known: _Known = {}
    take = Scratch().take if scratch is None else scratch.take
    try:
        student, teacher = (
            _read_lists(_pages(data, file, name, take), file.num_rows, known, take)
            for name in _CUTS
        )
    except (_OtherLayoutError, IndexError, KeyError, ValueError, pa.ArrowException):
        return None
    if not np.array_equal(student[0], teacher[0]):
        return None
    return {"cut_starts": student[0], "cut_student": student[1], "cut_teacher": teacher[1]}


def _read_lists(
    pages: Iterable[_Page], num_lists: int, known: _Known, take: _Take
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Return a column's lists: where each starts and the last ends, and their values."""
    starts, values, num_values = [], [], 0
    for page in pages:
        own_starts, place, count = _read_starts(page, num_lists, known)
        own = take(4 * count).view(np.uint32)
        if not _unpack_deltas(page.data, page.data.view(np.uint64), page.num_bytes, place, own):
            raise _OtherLayoutError
        starts.append(own_starts + num_values)
        values.append(own)
        num_values += count
    joined = np.concatenate([*starts, np.array([num_values])])
    if len(joined) != num_lists + 1 or joined[0] != 0:
        raise _OtherLayoutError
    if len(values) == 1:
        return joined, values[0]
    return joined, np.concatenate([np.empty(0, np.uint32), *values])


def _pages(data: bytes, file: pq.FileMetaData, name: str, take: _Take) -> Iterator[_Page]:
    """Yield a column's pages in order."""
    for number in range(file.num_row_groups):
        group = file.row_group(number)
        paths = [group.column(place).path_in_schema for place in range(group.num_columns)]
        chunk = group.column(paths.index(f"{name}.list.element"))
        if chunk.compression != "ZSTD" or chunk.has_dictionary_page:
            raise _OtherLayoutError
        place = chunk.data_page_offset
        stop = place + chunk.total_compressed_size
        while place < stop:
            header, place = _read_struct(data, place)
            num_bytes, num_stored, about = header[2], header[3], header.get(5)
            if header[1] != _DATA_PAGE or not isinstance(about, dict):
                raise _OtherLayoutError
            if (about[2], about[3], about[4]) != (_DELTA_BINARY_PACKED, _RLE, _RLE):
                raise _OtherLayoutError
            if not 0 <= num_bytes <= chunk.total_uncompressed_size:
                raise _OtherLayoutError
            stored = pa.BufferReader(pa.py_buffer(data).slice(place, num_stored))
            padded = take((num_bytes // _WORD_BYTES + 2) * _WORD_BYTES)
            # Room for one byte more, by which a page shows that it is longer than told.
            opened = pa.CompressedInputStream(stored, "zstd")
            if opened.readinto(padded[: num_bytes + 1]) != num_bytes:
                raise _OtherLayoutError
            padded[num_bytes:] = 0
            yield _Page(padded, num_bytes, about[1])
            place += num_stored


def _read_starts(page: _Page, most: int, known: _Known) -> tuple[NDArray[np.int64], int, int]:
    """Return where a page's lists start among its values, where these are stored, their number.

    Args:
        page: the page.
        most: lists in the file.
        known: where those of other pages start; both columns mostly have the same pages.
    """
    middle = _section_stop(page, 0)
    stop = _section_stop(page, middle)
    section = page.num_levels, page.data[:stop].tobytes()
    if section not in known:
        begun, _ = _read_levels(page, 4, middle, width=1, usual=1, most=most)
        absent, levels = _read_levels(page, middle + 4, stop, width=2, usual=_ELEMENT, most=most)
        if (levels != _EMPTY_LIST).any():
            raise _OtherLayoutError
        starts = begun - np.searchsorted(absent, begun) if len(absent) else begun
        known[section] = starts, page.num_levels - len(absent)
    starts, count = known[section]
    return starts, stop, count


def _section_stop(page: _Page, place: int) -> int:
    """Return where levels end whose length in bytes stands before them."""
    stop = place + 4 + int.from_bytes(page.data[place : place + 4].tobytes(), "little")
    if stop > page.num_bytes:
        raise _OtherLayoutError
    return stop


def _read_levels(
    page: _Page, start: int, stop: int, *, width: int, usual: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return where levels are not the usual one, and what they are there."""
    places, levels = np.empty(most + 1, np.int64), np.empty(most + 1, np.uint8)
    found = _find_levels(page.data, start, stop, width, usual, page.num_levels, places, levels)
    if found < 0:
        raise _OtherLayoutError
    return places[:found], levels[:found]


def _read_struct(data: bytes, place: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct of Thrift's compact protocol, and what stands behind it."""
    fields: dict[int, Any] = {}
    number = 0
    while kind := data[place] & 15:
        step, place = data[place] >> 4, place + 1
        if not step:
            raise _OtherLayoutError
        number += step
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (5, 6):
            value, place = _read_varint(data, place)
            fields[number] = value >> 1 ^ -(value & 1)
        elif kind == 8:
            length, place = _read_varint(data, place)
            fields[number], place = data[place : place + length], place + length
        elif kind == 12:
            fields[number], place = _read_struct(data, place)
        else:
            raise _OtherLayoutError
    return fields, place + 1


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value, shift = 0, 0
    while data[place] & 0x80:
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1


@compiled
def _find_levels(
    data: NDArray[np.uint8],
    start: int,
    stop: int,
    width: int,
    usual: int,
    count: int,
    places: NDArray[np.int64],
    levels: NDArray[np.uint8],
) -> int:
    """Find the levels that are not the usual one; return how many, -1 where not all can be read.

    Args:
        data: uint8, runs of one level or of packed ones between `start` and `stop`.
        start: the first byte.
        stop: behind the last byte.
        width: bits of a level, 1 or 2.
        usual: a level.
        count: the number of levels.
        places: int64 [n], to fill with where they are, fewer than n.
        levels: uint8 [n], to fill with what they are.
    """
    found, level, place = 0, 0, start
    while level < count:
        header, place = _varint(data, place, stop)
        run, packed = header >> 1, header & 1
        size = run * width if packed else 1
        if place < 0 or not 0 < run <= count or size > stop - place:
            return -1
        length = min(run * 8 if packed else run, count - level)
        if packed or data[place] != usual:
            for own in range(length):
                value = int(data[place])
                if packed:
                    bit = own * width
                    value = (int(data[place + (bit >> 3)]) >> (bit & 7)) & ((1 << width) - 1)
                # Written in any case: a branch would cost more.
                places[found], levels[found] = level + own, value
                found += value != usual
                if found == len(places):
                    return -1
        level += length
        place += size
    return found


@compiled
def _unpack_deltas(
    data: NDArray[np.uint8],
    words: NDArray[np.uint64],
    size: int,
    place: int,
    out: NDArray[np.uint32],
) -> bool:
    """Write the values of a DELTA_BINARY_PACKED section; return whether they are so many.

    Args:
        data: uint8, padded as a `_Page` is.
        words: the same bytes, uint64.
        size: bytes before the padding.
        place: where the section starts.
        out: uint32 [n], to fill.
    """
    block, place = _varint(data, place, size)
    parts, place = _varint(data, place, size)
    total, place = _varint(data, place, size)
    first, place = _varint(data, place, size)
    if place < 0 or total != len(out) or not 0 < parts <= block <= 1 << 20:
        return False
    part_length = block // parts
    if part_length % 32:
        return False
    value, done = _signed(first), min(1, len(out))
    out[:done] = value
    while done < len(out):
        packed_least, widths = _varint(data, place, size)
        least, place = _signed(packed_least), widths + parts
        if widths < 0 or place > size:
            return False
        for part in range(parts):
            width, stop = int(data[widths + part]), min(done + part_length, len(out))
            part_bytes = part_length // 8 * width if done < stop else 0
            if width > 32 or part_bytes > size - place:
                return False
            mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
            bit, bits = np.uint64(place * 8), np.uint64(width)
            for own in range(done, stop):
                word, shift = bit >> np.uint64(6), bit & np.uint64(63)
                # Shifted by 64 in two steps: by 64 at once is not defined.
                high = (words[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - shift)
                value += int(((words[word] >> shift) | high) & mask) + least
                out[own] = value & 0xFFFFFFFF
                bit += bits
            done = stop
            place += part_bytes
    return True


@compiled
def _varint(data: NDArray[np.uint8], place: int, stop: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and what stands behind; -1 where it does not end."""
    value = 0
    if place >= 0:
        for own in range(min(10, stop - place)):
            byte = int(data[place + own])
            value |= (byte & 0x7F) << (7 * own)
            if byte < 0x80:
                return value, place + own + 1
    return value, -1


@compiled
def _signed(value: int) -> int:
    """Return a number whose sign is stored in the last bit; of 64 bits the lower 32 are right."""
    return (value >> 1) ^ -(value & 1)
