"""Compressed streams that notice cuts.

Beam takes a cut for the end of the data; `bz2.open` and `lzma.open` take a damaged second stream
for padding. Here both raise DamageError after the sound data.
"""

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, cast

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

from beam_jobs.first_bytes import why_not_utf8

_CHUNK_BYTES = 1 << 17
_BUFFER_BYTES = 1 << 20
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}
_XZ_MAX_BYTES = 1 << 31


class DamageError(ValueError):
    """A file's bytes break its format, or end too early.

    `num_read` stored bytes precede the damage, None if unknown.
    """

    def __init__(self, message: str, *, num_read: int | None = None) -> None:
        """Take a dead letter's detail."""
        super().__init__(message)
        self.num_read = num_read


def decompress(file: BinaryIO, compression: str) -> BinaryIO:
    """A buffered stream of uncompressed bytes.

    Consecutive frames are one; zeros after them, padding of xz and tapes, are skipped.
    """
    if compression == "none":
        return file
    raw = _Frames(file, _DECOMPRESSORS[compression])
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


def require_utf8(data: BinaryIO) -> None:
    """Raise DamageError for text marked as UTF-16 or UTF-32."""
    if isinstance(data, io.BufferedReader):
        start = data.peek(4)
    else:  # a store's own buffer, which can go back
        start = data.read(4)
        data.seek(0)
    if why := why_not_utf8(start):
        raise DamageError(why, num_read=0)


class _Frames(io.RawIOBase):
    """A file's frames, decompressed on demand: a few bytes can hold gigabytes."""

    def __init__(self, file: BinaryIO, new_decompressor: Callable[[], Any]) -> None:
        self._file, self._new_decompressor = file, new_decompressor
        self._decompressor = new_decompressor()
        self._passed = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._passed

    def readinto(self, buffer: Any) -> int:
        data = self._take(len(buffer))
        buffer[: len(data)] = data
        self._passed += len(data)
        return len(data)

    def _take(self, most: int) -> bytes:
        data = b""
        while not data:
            stored = b""
            if self._decompressor.eof:
                stored = self._find_frame()
                if not stored:
                    return b""
                self._decompressor = self._new_decompressor()
            elif self._decompressor.needs_input:
                stored = self._file.read(_CHUNK_BYTES)
                if not stored and not self._file.tell():
                    return b""  # an empty file has no data, compressed or not
                if not stored:
                    cut = f"the compressed data is cut after {self._file.tell()} bytes"
                    raise DamageError(cut, num_read=self._file.tell())
            try:
                data = self._decompressor.decompress(stored, most)
            except (OSError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:  # OSError: bzip2
                raise DamageError(str(error), num_read=self._file.tell() - len(stored)) from error
        return data

    def _find_frame(self) -> bytes:
        stored: bytes = self._decompressor.unused_data
        while not (found := stored.lstrip(b"\0")):
            stored = self._file.read(_CHUNK_BYTES)
            if not stored:
                break
        return found


class _GzipMember:
    """A gzip member, like other decompressors."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._member.unconsumed_tail

    def decompress(self, stored: bytes, most: int) -> bytes:
        return self._member.decompress(self._member.unconsumed_tail + stored, most)


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": _GzipMember,
    "zstd": partial(zstd.ZstdDecompressor, options=_ZSTD_OPTIONS),
    "bzip2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, memlimit=_XZ_MAX_BYTES),
}
