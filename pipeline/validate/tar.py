"""Read a shard once: hash it, and check every tar member.

Nothing seeks, so remote shards stream; memory holds one window of members.
"""

import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.validate.findings import Findings
from schemas.document import MEMBER_SUFFIX
from schemas.index import ShardIndex

BLOCK: Final = tarfile.BLOCKSIZE
WINDOW_BYTES: Final = 8 << 20
"""Payload read at a time; a larger sample is a window of its own."""


@dataclass(frozen=True)
class Sample:
    """A sound tar member's payload and row in the index."""

    place: int
    payload: bytes


class FileDigest(NamedTuple):
    """Size and SHA-256 of the bytes read."""

    num_bytes: int
    sha256: str


class TarReader:
    """One pass over a shard's tar; its digest is complete after `windows`."""

    digest: FileDigest

    def __init__(
        self,
        file: IO[bytes],
        index: ShardIndex,
        findings: Findings,
        advance: Callable[[int], object],
    ) -> None:
        """Read an open tar; `advance` gets the number of bytes of each read."""
        self._file = file
        self._advance = advance
        self._index = index
        self._findings = findings
        self._hash = sha256()
        self.position = 0

    def windows(self) -> Iterator[list[Sample]]:
        """Yield sound samples, window by window; report damaged ones."""
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
            if num_in_order == len(self._index):
                self._check_end()
        while self._read(WINDOW_BYTES):
            pass
        self.digest = FileDigest(self.position, self._hash.hexdigest())

    def _check_layout(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
        """Return how many rows lie end to end."""
        expected = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(starts)]
        wrong = np.flatnonzero(starts != expected)
        if len(wrong) == 0:
            return len(starts)
        row = int(wrong[0])
        self._findings.add(
            "index",
            f"payload_offset of row {row} is {int(starts[row]) + BLOCK}, but the members before it "
            f"end at byte {expected[row]}; this and the {len(starts) - row - 1} rows after it were "
            "not read",
            key=self._index.key[row],
        )
        return row

    def _check_members(self, first: int, last: int, base: int, data: bytes) -> list[Sample]:
        samples = []
        for row in range(first, last):
            key, crc32 = self._index.key[row], int(self._index.crc32[row])
            start = int(self._index.payload_offset[row]) - base
            end = start + int(self._index.payload_bytes[row])
            name = key + MEMBER_SUFFIX
            if problem := _header_problem(data[start - BLOCK : start], name, end - start):
                self._findings.add("tar", problem, key=key)
                continue
            if any(data[end : start + _padded(end - start)]):
                text = f"padding after the payload at byte {base + end} not zero"
                self._findings.add("tar", text, key=key)
            found = zlib.crc32(data[start:end])
            if found == crc32:
                samples.append(Sample(row, data[start:end]))
            else:
                text = f"payload has CRC-32 {found:08x}, the index says {crc32:08x}"
                self._findings.add("crc32", text, key=key)
        return samples

    def _report_cut(self, row: int, position: int) -> None:
        num_missing = len(self._index) - row
        self._findings.add(
            "tar",
            f"tar ends at byte {position}: this member and the {num_missing - 1} after it are cut "
            "off or missing",
            key=self._index.key[row],
        )

    def _check_end(self) -> None:
        start = self.position
        rest = self._read(2 * BLOCK)
        if len(rest) < 2 * BLOCK:
            found = f"{len(rest)} bytes after the last member"
            self._findings.add("tar", f"tar has {found}, not the two zero blocks of its end")
        elif any(rest) or self._read(1):
            text = f"other bytes than the two zero blocks of its end follow byte {start}"
            self._findings.add("tar", text)

    def _read(self, num_bytes: int) -> bytes:
        parts = []
        while num_bytes and (part := self._file.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
        data = b"".join(parts)
        self._hash.update(data)
        self.position += len(data)
        self._advance(len(data))
        return data


def digest_file(file: IO[bytes], advance: Callable[[int], object]) -> FileDigest:
    """Return the size and SHA-256 of the rest of a file."""
    digest, num_bytes = sha256(), 0
    while data := file.read(WINDOW_BYTES):
        digest.update(data)
        num_bytes += len(data)
        advance(len(data))
    return FileDigest(num_bytes, digest.hexdigest())


def _padded(size: Any) -> Any:
    return -(-size // BLOCK) * BLOCK


def _split(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that fill about a window each."""
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(ends, starts[first] + WINDOW_BYTES, side="right"))
        last = max(last, first + 1)
        yield first, last
        first = last


def _header_problem(header: bytes, name: str, size: int) -> str:
    expected = tarfile.TarInfo(name)
    expected.size = size
    with suppress(ValueError):  # an altered key is too long for a name
        if header == expected.tobuf(tarfile.USTAR_FORMAT):
            return ""
    try:
        found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        return f"tar header of {name} is damaged ({error})"
    said = f"{found.name!r} with {found.size} bytes"
    return f"tar member is {said}, not {name!r} with {size}, or has another owner, mode or time"
