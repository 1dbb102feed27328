"""Read a shard once, from first to last byte: hash it, and check every tar member on the way.

Nothing here seeks, so remote shards stream; memory holds one window of members at a time.
"""

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.validate.findings import Findings
from schemas.document import MEMBER_SUFFIX
from schemas.index import ShardIndex

BLOCK: Final = tarfile.BLOCKSIZE
WINDOW_BYTES: Final = 8 << 20
"""Payload read at a time; a larger sample is a window of its own."""

_CHECKSUM: Final = slice(148, 156)
_CHECKSUM_DIGITS: Final = slice(148, 154)
_SIZE_DIGITS: Final = slice(124, 135)
_TYPE: Final = 156
_MAGIC: Final = slice(257, 262)


@dataclass(frozen=True)
class Sample:
    """One payload whose tar member is sound and whose CRC-32 is the index's.

    Attributes:
        place: its place in the index.
        payload: the sample's bytes.
    """

    place: int
    payload: bytes


@dataclass(frozen=True)
class FileDigest:
    """What was read of a file.

    Attributes:
        num_bytes: its size.
        sha256: 64 hex digits.
    """

    num_bytes: int
    sha256: str


class TarReader:
    """One pass over a shard's tar.

    Attributes:
        position: bytes read so far.
        digest: size and hash of the whole file, known once `windows` is exhausted.
    """

    digest: FileDigest

    def __init__(
        self,
        file: IO[bytes],
        index: ShardIndex,
        findings: Findings,
        advance: Callable[[int], object],
    ) -> None:
        """Read `file`, whose samples lie where `index` says.

        Args:
            file: the tar, open for reading.
            index: the shard's index.
            findings: takes what is found.
            advance: takes the number of bytes of each read.
        """
        self._file = file
        self._advance = advance
        self._index = index
        self._findings = findings
        self._hash = sha256()
        self.position = 0

    def windows(self) -> Iterator[list[Sample]]:
        """Yield the sound samples, window by window; damaged ones are reported and left out."""
        starts = self._index.payload_offset - BLOCK
        ends = starts + BLOCK + _padded(self._index.payload_bytes)
        num_in_order = self._check_layout(starts, ends)
        for first, last in _split(starts[:num_in_order], ends[:num_in_order]):
            base = self.position
            data = self._read(int(ends[last - 1]) - base)
            present = int(np.searchsorted(ends[first:last] - base, len(data), side="right"))
            yield self._check_members(first, first + present, base, data)
            if present < last - first:
                self._report_cut(first + present, base + len(data))
                break
        else:
            self._check_end(whole=num_in_order == len(self._index))
        self._drain()
        self.digest = FileDigest(self.position, self._hash.hexdigest())

    def _check_layout(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
        """Return how many rows follow one another as members of a tar do."""
        expected = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(starts)]
        wrong = np.flatnonzero(starts != expected)
        if len(wrong) == 0:
            return len(starts)
        row = int(wrong[0])
        self._findings.add(
            "index",
            f"payload_offset of row {row} is {starts[row] + BLOCK}, but the members before it end "
            f"at byte {expected[row]}; this and the {len(starts) - row - 1} rows after it were "
            "not read",
            key=self._index.key[row],
        )
        return row

    def _check_members(self, first: int, last: int, base: int, data: bytes) -> list[Sample]:
        offsets = self._index.payload_offset[first:last] - base
        sizes = self._index.payload_bytes[first:last]
        names = [key + MEMBER_SUFFIX for key in self._index.key[first:last]]
        sound = _sound_headers(np.frombuffer(data, np.uint8), offsets - BLOCK, sizes, names)
        samples = []
        for i, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
            key, end = self._index.key[first + i], offset + size
            if not sound[i]:
                problem = _header_problem(data[offset - BLOCK : offset], names[i], size)
                self._findings.add("tar", problem, key=key)
                continue
            padding = data[end : offset + _padded(size)]
            if padding.count(0) != len(padding):
                self._findings.add(
                    "tar", f"padding after the payload at byte {base + end} not zero", key=key
                )
            payload = data[offset:end]
            crc32 = zlib.crc32(payload)
            if crc32 == self._index.crc32[first + i]:
                samples.append(Sample(first + i, payload))
            else:
                expected = int(self._index.crc32[first + i])
                self._findings.add(
                    "crc32",
                    f"payload has CRC-32 {crc32:08x}, the index says {expected:08x}",
                    key=key,
                )
        return samples

    def _report_cut(self, row: int, position: int) -> None:
        num_missing = len(self._index) - row
        self._findings.add(
            "tar",
            f"tar ends at byte {position}: this member and the {num_missing - 1} after it are cut "
            "off or missing",
            key=self._index.key[row],
        )

    def _check_end(self, *, whole: bool) -> None:
        """Check that nothing but zero blocks follows the last member."""
        if not whole:
            return
        start = self.position
        rest = self._read(2 * BLOCK)
        if len(rest) < 2 * BLOCK:
            found = f"{len(rest)} bytes after the last member"
            self._findings.add("tar", f"tar has {found}, not the two zero blocks of its end")
        while rest:
            if rest.count(0) != len(rest):
                self._findings.add("tar", f"bytes other than zero follow the tar's end at {start}")
                break
            rest = self._read(WINDOW_BYTES)

    def _drain(self) -> None:
        while self._read(WINDOW_BYTES):
            pass

    def _read(self, num_bytes: int) -> bytes:
        data = read_exactly(self._file, num_bytes)
        self._hash.update(data)
        self.position += len(data)
        self._advance(len(data))
        return data


def read_exactly(file: IO[bytes], num_bytes: int) -> bytes:
    """Return the next bytes of a file: fewer than asked only at its end."""
    data = file.read(num_bytes)
    if len(data) == num_bytes or not data:
        return data
    parts = io.BytesIO()
    while data:
        parts.write(data)
        data = file.read(num_bytes - parts.tell()) if parts.tell() < num_bytes else b""
    return parts.getvalue()


def digest_file(file: IO[bytes], advance: Callable[[int], object]) -> FileDigest:
    """Return size and SHA-256 of a file, read to its end."""
    digest, num_bytes = sha256(), 0
    while data := file.read(WINDOW_BYTES):
        digest.update(data)
        num_bytes += len(data)
        advance(len(data))
    return FileDigest(num_bytes, digest.hexdigest())


def _padded(size: Any) -> Any:
    return -(-size // BLOCK) * BLOCK


def _split(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that fill about one window each."""
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(ends, starts[first] + WINDOW_BYTES, side="right"))
        last = max(last, first + 1)
        yield first, last
        first = last


def _sound_headers(
    data: NDArray[np.uint8],
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    names: list[str],
) -> NDArray[np.bool_]:
    """Return which tar headers are plain files of these names and sizes with good checksums."""
    headers = data[positions[:, None] + np.arange(BLOCK)]
    stored = _octal(headers[:, _CHECKSUM_DIGITS])
    sums = headers.sum(axis=1, dtype=np.int64)
    sums += 8 * ord(" ") - headers[:, _CHECKSUM].sum(axis=1, dtype=np.int64)
    named = np.ascontiguousarray(headers[:, :100]).view("S100").ravel() == np.array(names, "S100")
    sized = _octal(headers[:, _SIZE_DIGITS]) == sizes
    plain = (headers[:, _TYPE] == ord("0")) & (headers[:, _MAGIC] == list(b"ustar")).all(axis=1)
    return np.asarray((sums == stored) & named & sized & plain)


def _octal(digits: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return numbers written in octal digits; -1 where another character stands."""
    values = digits.astype(np.int64) - ord("0")
    numbers = values @ (8 ** np.arange(values.shape[1] - 1, -1, -1, dtype=np.int64))
    return np.where(((values >= 0) & (values < 8)).all(axis=1), numbers, -1)


def _header_problem(header: bytes, name: str, size: int) -> str:
    try:
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        return f"tar header of {name} is damaged ({error})"
    if member.name != name:
        return f"tar member is {member.name!r} where the index has {name!r}"
    if member.size != size:
        return f"tar member {name} has {member.size} bytes, the index says {size}"
    return f"tar member {name} is no plain ustar file (type {member.type!r})"
