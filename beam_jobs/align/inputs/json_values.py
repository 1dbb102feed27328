"""The values of a JSON file that is not one value a line: an array, or objects over several lines.

The elements of a top-level array, and every other top-level value, are handed on one by one with
their place in the file, so such a file needs no more memory than its longest value. Nothing is
parsed here: brackets and quotes are counted, which finds the ends of values and survives a bad one.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from beam_jobs.align.inputs.decompression import CutStreamError
from pipeline.compiled import compiled

HEAD_BYTES = 1 << 16
"""How much of a file is looked at to distinguish values from lines."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_CHUNK_BYTES = 1 << 20
_BETWEEN = re.compile(rb"[\s,]*")
_AFTER_SCALAR = re.compile(rb"[\s,\[\]{}]")


class JsonValue(NamedTuple):
    """One value of a JSON file.

    Attributes:
        position: byte at which it starts.
        num_bytes: its length.
        data: its bytes, None if it is longer than allowed.
    """

    position: int
    num_bytes: int
    data: bytes | None


def holds_values(head: bytes, *, may_be_pretty: bool) -> bool:
    """Return whether a JSON file is to be read value by value instead of line by line.

    Args:
        head: its first bytes, up to `HEAD_BYTES` of them.
        may_be_pretty: whether an object may go over several lines, as in a `.json` file; in a
            `.jsonl` file a first line that is cut is a bad line.

    Example:
        >>> holds_values(b'[{"text": "a"},', may_be_pretty=False)
        True
    """
    line, newline, _ = head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line[:1] == b"[" or (may_be_pretty and bool(newline) and line[:1] == b"{")
    is_list = isinstance(value, list)
    return is_list and (may_be_pretty or any(isinstance(element, dict) for element in value))


def split_values(file: BinaryIO, max_value_bytes: int) -> Iterator[JsonValue]:
    """Yield the values of a JSON file in order.

    Raises:
        CutStreamError: the file ends within a value, or within its array.

    Example:
        >>> [value.data for value in split_values(io.BytesIO(b'[{"a": 1}, {"a": 2}]'), 100)]
        [b'{"a": 1}', b'{"a": 2}']
    """
    window = _Window(file)
    window.skip(BYTE_ORDER_MARK)
    array_start = -1
    while (byte := window.next_byte()) is not None:
        if byte == b"[" and array_start < 0:
            array_start = window.position
            window.at += 1
        elif byte in b"]}":
            array_start = -1
            window.at += 1
        else:
            yield window.take_value(byte, max_value_bytes)
    if array_start >= 0:
        raise CutStreamError(
            f"the array that starts at byte {array_start} is not closed: the file is cut after "
            f"{window.position} bytes"
        )


class _Window:
    """The part of a file that is looked at."""

    def __init__(self, file: BinaryIO) -> None:
        self.at = 0
        self._file = file
        self._buffer = bytearray()
        self._dropped = 0

    @property
    def position(self) -> int:
        return self._dropped + self.at

    def skip(self, prefix: bytes) -> None:
        self._fetch()
        if self._buffer.startswith(prefix):
            self.at = len(prefix)

    def next_byte(self) -> bytes | None:
        """Return the first byte of the next value or bracket, None at the end of the file."""
        while True:
            found = _BETWEEN.match(self._buffer, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self._buffer):
                return bytes(self._buffer[self.at : self.at + 1])
            if not self._fetch():
                return None

    def take_value(self, first: bytes, max_bytes: int) -> JsonValue:
        """Return the value that starts here; of one that is too long only its length."""
        position, is_scalar = self.position, first not in b'{["'
        state = np.zeros(3, np.int64)
        while not (is_scalar and self._pass_scalar()) and not (
            not is_scalar and self._pass_nested(state)
        ):
            if self.position - position > max_bytes:
                del self._buffer[: self.at]
                self._dropped, self.at = self._dropped + self.at, 0
            start = max(0, position - self._dropped)
            if not self._fetch(keep_from=start):
                if is_scalar:
                    break
                raise CutStreamError(f"the file is cut after {self.position} bytes, in a value")
        num_bytes = self.position - position
        start = position - self._dropped
        is_whole = start >= 0 and num_bytes <= max_bytes
        data = bytes(self._buffer[start : self.at]) if is_whole else None
        return JsonValue(position, num_bytes, data)

    def _pass_scalar(self) -> bool:
        found = _AFTER_SCALAR.search(self._buffer, self.at)
        self.at = found.start() if found else len(self._buffer)
        return found is not None

    def _pass_nested(self, state: NDArray[np.int64]) -> bool:
        data = np.frombuffer(self._buffer, np.uint8)
        self.at = int(_find_end(data, self.at, state))
        return bool(state[0] == 0 and state[1] == 0)

    def _fetch(self, *, keep_from: int | None = None) -> bool:
        """Read on; what comes before `keep_from`, or before here, is released."""
        kept = self.at if keep_from is None else keep_from
        del self._buffer[:kept]
        self._dropped += kept
        self.at -= kept
        data = self._file.read(_CHUNK_BYTES)
        self._buffer += data
        return bool(data)


@compiled
def _find_end(data: NDArray[np.uint8], start: int, state: NDArray[np.int64]) -> int:
    """Return where the value ends whose brackets and quotes `state` counts, or the data's end.

    `state` is depth, whether within a string, whether after a backslash; all 0: before the value,
    or after it.
    """
    depth, in_string, escaped = state[0], state[1], state[2]
    i = start
    while i < len(data):
        byte = data[i]
        i += 1
        if in_string:
            if escaped:
                escaped = 0
            elif byte == 0x5C:  # backslash
                escaped = 1
            elif byte == 0x22:  # quote
                in_string = 0
                if depth == 0:
                    break
        elif byte == 0x22:
            in_string = 1
        elif byte == 0x5B or byte == 0x7B:  # [ {
            depth += 1
        elif byte == 0x5D or byte == 0x7D:  # ] }
            depth -= 1
            if depth == 0:
                break
    state[0], state[1], state[2] = depth, in_string, escaped
    return i
