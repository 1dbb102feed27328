"""Compressed streams that notice when they are cut.

Beam's own decompression takes the end of the file for the end of the data, so half a file reads
like a whole one, and `bz2.open` and `lzma.open` take a second stream that is damaged for padding.
Here the end of a file inside a compressed frame, and whatever else isn't a frame, is an error,
raised after the data before it was delivered.
"""

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_CHUNK_BYTES = 1 << 17
_BUFFER_BYTES = 1 << 20
_GZIP_MAGIC_BYTES = 2
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}
_XZ_MAX_BYTES = 1 << 31


class CutStreamError(ValueError):
    """A compressed file ends before its data does."""


class DamagedStreamError(ValueError):
    """A compressed file's data is not what its format allows."""


DAMAGE = (CutStreamError, DamagedStreamError)
"""What reading a damaged stream raises; failures of the storage are other errors."""


def decompress(file: BinaryIO, compression: str) -> BinaryIO:
    """Return a buffered stream of a file's uncompressed bytes.

    Args:
        file: the file as stored.
        compression: "none", "gzip", "zstd", "bzip2" or "xz"; several members or frames in a row are
            one stream.
    """
    if compression == "none":
        return file
    raw = _Gzip(file) if compression == "gzip" else _Frames(file, _DECOMPRESSORS[compression])
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


class _Stream(io.RawIOBase):
    """Uncompressed bytes, as many at a time as are asked for: little can hold gigabytes."""

    _passed = 0

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
        raise NotImplementedError


class _Gzip(_Stream):
    """The members of a gzip file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._members = file, gzip.GzipFile(fileobj=file, mode="rb")

    def _take(self, most: int) -> bytes:
        try:
            data = self._members.read1(most)  # one step: `read` loses what comes before damage
        except EOFError as error:
            raise _cut(self._file) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            if self._file.tell() >= _GZIP_MAGIC_BYTES:
                raise DamagedStreamError(str(error)) from error
            raise _cut(self._file) from error
        if not data and not self._file.tell():
            raise _cut(self._file)  # GzipFile takes an empty file for a whole one
        return data


class _Frames(_Stream):
    """The frames of a zstd, bzip2 or xz file."""

    def __init__(self, file: BinaryIO, new_decompressor: Callable[[], Any]) -> None:
        self._file, self._new_decompressor = file, new_decompressor
        self._decompressor = new_decompressor()

    def _take(self, most: int) -> bytes:
        data = b""
        while not data:
            stored = self._decompressor.unused_data if self._decompressor.eof else b""
            if not stored and (self._decompressor.eof or self._decompressor.needs_input):
                stored = self._file.read(_CHUNK_BYTES)
                if not stored and self._decompressor.eof:
                    return b""
                if not stored:
                    raise _cut(self._file)
            if self._decompressor.eof:
                self._decompressor = self._new_decompressor()
            try:
                data = self._decompressor.decompress(stored, most)
            except (OSError, lzma.LZMAError, zstd.ZstdError) as error:  # bzip2's is an OSError
                raise DamagedStreamError(str(error)) from error
        return data


def _cut(file: BinaryIO) -> CutStreamError:
    return CutStreamError(f"the compressed data is cut after {file.tell()} bytes")


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "zstd": partial(zstd.ZstdDecompressor, options=_ZSTD_OPTIONS),
    "bzip2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, memlimit=_XZ_MAX_BYTES),
}
