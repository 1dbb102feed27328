"""Compressed streams that notice when they are cut.

Beam's own decompression and zstandard's stream readers take the end of the file for the end of the
data, so half a file reads like a whole one. Here the end of a file inside a compressed frame is an
error, raised after the data before it was delivered.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import zstandard

_CHUNK_BYTES = 1 << 17
_BUFFER_BYTES = 1 << 20
_GZIP_WINDOW_BITS = 31
_ZSTD_MAX_WINDOW_BYTES = 1 << 31
_XZ_MAX_BYTES = 1 << 31
_READY_BYTES = 1 << 22


class CutStreamError(ValueError):
    """A compressed file ends before its data does."""


class DamagedStreamError(ValueError):
    """A compressed file's data is not what its format allows."""


DAMAGE = (CutStreamError, DamagedStreamError, zlib.error, zstandard.ZstdError, lzma.LZMAError)
"""What reading a damaged stream raises; failures of the storage are other errors."""


def decompress(file: BinaryIO, compression: str) -> BinaryIO:
    """Return a buffered stream of a file's uncompressed bytes.

    Args:
        file: the file as stored.
        compression: "none", "gzip", "zstd", "bzip2" or "xz"; several members or frames in a row are
            one stream.

    Example:
        >>> decompress(open("corpus.jsonl.gz", "rb"), "gzip").readline()  # doctest: +SKIP
    """
    if compression == "none":
        return file
    raw = _Decompressed(file, _DECOMPRESSORS[compression])
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


class _Decompressed(io.RawIOBase):
    """The concatenated frames of a compressed file."""

    def __init__(self, file: BinaryIO, new_decompressor: Callable[[], Any]) -> None:
        self._file, self._new_decompressor = file, new_decompressor
        self._decompressor = new_decompressor()
        self._compressed = b""
        self._ready = memoryview(b"")
        self._num_compressed_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._compressed and self._needs_input() and not self._fetch():
                return 0
            if self._decompressor.eof:
                self._decompressor = self._new_decompressor()
            self._ready = memoryview(self._decompressor.decompress(self._compressed))
            self._compressed = self._decompressor.unused_data if self._decompressor.eof else b""
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _needs_input(self) -> bool:
        return self._decompressor.eof or getattr(self._decompressor, "needs_input", True)

    def _fetch(self) -> bool:
        self._compressed = self._file.read(_CHUNK_BYTES)
        self._num_compressed_bytes += len(self._compressed)
        if not self._compressed and not self._decompressor.eof:
            raise CutStreamError(
                f"the compressed data is cut after {self._num_compressed_bytes} bytes"
            )
        return bool(self._compressed)


def _gzip_decompressor() -> Any:
    return zlib.decompressobj(_GZIP_WINDOW_BITS)


def _zstd_decompressor() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES).decompressobj()


class _Bounded:
    """A decompressor of the standard library that gives a few megabytes at a time.

    A hundred kilobytes of bzip2 or xz can hold gigabytes.
    """

    def __init__(self, decompressor: Any) -> None:
        self._decompressor = decompressor

    def decompress(self, data: bytes) -> bytes:
        try:
            ready: bytes = self._decompressor.decompress(data, _READY_BYTES)
        except OSError as error:  # bzip2's own, without a number: not the storage's
            raise DamagedStreamError(str(error)) from error
        return ready

    @property
    def eof(self) -> bool:
        return bool(self._decompressor.eof)

    @property
    def needs_input(self) -> bool:
        return bool(self._decompressor.needs_input)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._decompressor.unused_data)


def _bzip2_decompressor() -> Any:
    return _Bounded(bz2.BZ2Decompressor())


def _xz_decompressor() -> Any:
    return _Bounded(lzma.LZMADecompressor(memlimit=_XZ_MAX_BYTES))


_DECOMPRESSORS = {
    "gzip": _gzip_decompressor,
    "zstd": _zstd_decompressor,
    "bzip2": _bzip2_decompressor,
    "xz": _xz_decompressor,
}
