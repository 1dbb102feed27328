"""Values of a JSON file that isn't lines: an array, or objects over several lines.

They come one by one: memory holds only the longest. Counting brackets and quotes finds their ends.
A missing one breaks the count: an invalid value ends where the next begins like the file's first.
"""

import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from beam_jobs.align.inputs.decompression import DamageError
from beam_jobs.align.inputs.documents import Reason, UnusableError
from beam_jobs.align.inputs.json_parsing import find_end, parse_json
from beam_jobs.first_bytes import why_not_utf8

HEAD_BYTES = 1 << 16
"""Of a file, to distinguish values from lines."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_CHUNK_BYTES = 1 << 20
_BETWEEN = re.compile(rb"(?:[\s,\0]|\xef\xbb\xbf)*")
_AFTER_SCALAR = re.compile(rb"[\s,\[\]{}]")
_OPENING = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')
_MAYBE_OPENING = re.compile(rb"[^:\[\s]\s*\{")
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_LONGEST_OPENING = 1 << 9
_LAST_CHARACTERS = 12
"""An error this close to the end of the bytes read may be a cut, as in `"\\u00`."""


class JsonValue(NamedTuple):
    """A value from byte `position`, or why it can't be used."""

    position: int
    num_bytes: int
    record: Any
    error: UnusableError | None = None


def holds_values(head: bytes, *, may_be_pretty: bool) -> bool:
    """Whether to read a JSON file by values instead of lines.

    `head` has up to `HEAD_BYTES`. Only a `.json` file's objects may span lines.

    Example:
        >>> holds_values(b'[{"text": "a"},', may_be_pretty=False)
        True
    """
    if why_not_utf8(head[:4]):
        return True  # unreadable; parts of it couldn't say why
    line, newline, _ = head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        if line[:1] != b"{":
            return line[:1] == b"["
        if newline:
            return may_be_pretty
        first = split_line(line, UnusableError(Reason.BAD_JSON, ""))[0]
        return first.error is None and line[first.num_bytes :].lstrip()[:1] == b"{"
    is_list = isinstance(value, list)
    return is_list and (may_be_pretty or any(isinstance(element, dict) for element in value))


def split_line(line: bytes, error: UnusableError) -> list[JsonValue]:
    """A bad line's values: objects without newlines between them, or torn ones."""
    values: list[JsonValue] = []
    if line.startswith(b"{"):
        try:
            for value in split_values(io.BytesIO(line), len(line)):
                values.append(value._replace(error=value.error and error))
        except DamageError:
            end = values[-1].position + values[-1].num_bytes if values else 0
            values.append(JsonValue(end, len(line) - end, None, error))
    is_split = any(value.error is None for value in values)
    return values if is_split else [JsonValue(0, len(line), None, error)]


def split_values(file: BinaryIO, max_value_bytes: int) -> Iterator[JsonValue]:
    """Yield a file's values in order; DamageError if it is cut or stops being JSON."""
    window = _Window(file)
    array_start = -1
    while (byte := window.next_byte()) is not None:
        if byte == b"[" and array_start < 0:
            array_start = window.position
            window.at += 1
        elif byte in b"]}":
            array_start = -1 if byte == b"]" else array_start
            window.at += 1
        else:
            yield window.take_value(byte, max_value_bytes)
    if array_start >= 0:
        raise DamageError(
            f"the array that starts at byte {array_start} is not closed: the file is cut after "
            f"{window.position} bytes"
        )


class _Window:
    def __init__(self, file: BinaryIO) -> None:
        self.at = 0
        # `read` would lose the data before damage in a compressed stream.
        self._read = getattr(file, "read1", file.read)
        self._buffer = bytearray()
        self._dropped = 0
        self._opening = b""

    @property
    def position(self) -> int:
        return self._dropped + self.at

    def next_byte(self) -> bytes | None:
        """First byte of the next value or bracket, None at the end."""
        while True:
            found = _BETWEEN.match(self._buffer, self.at)
            self.at = found.end() if found else self.at
            if len(self._buffer) - self.at >= len(BYTE_ORDER_MARK) or not self._fetch():
                return bytes(self._buffer[self.at : self.at + 1]) or None

    def take_value(self, first: bytes, max_bytes: int) -> JsonValue:
        """Take the value that starts here; only its length if too long."""
        position, is_scalar = self.position, first not in b'{["'
        state, next_check = np.zeros(3, np.int64), _CHUNK_BYTES
        while not (self._pass_scalar() if is_scalar else self._pass_nested(state)):
            num_bytes = self.position - position
            if num_bytes > min(next_check, max_bytes):
                if broken := self._skip_broken(position):
                    return broken
                next_check *= 2
            if num_bytes > max_bytes:
                self._drop(self.at)
            if not self._fetch(keep_from=max(0, position - self._dropped)):
                if is_scalar:
                    break
                if broken := self._skip_broken(position, may_go_on=False):
                    return broken
                raise DamageError(f"the file is cut after {self.position} bytes, in a value")
        return self._parse_value(position, max_bytes)

    def _parse_value(self, position: int, max_bytes: int) -> JsonValue:
        num_bytes, start = self.position - position, position - self._dropped
        detail = f"value of {num_bytes} bytes, the most {max_bytes}"
        record: Any = None
        error: UnusableError | None = UnusableError(Reason.TOO_LARGE, detail)
        if start >= 0 and num_bytes <= max_bytes:
            try:
                record, error = parse_json(bytes(self._buffer[start : self.at])), None
            except UnusableError as unusable:
                error = unusable
        if error is None and not isinstance(record, str):
            self._learn_opening(start)
        elif broken := self._skip_broken(position, ends_here=True):
            return broken
        elif start >= 0 and (self._buffer[start], self._buffer[self.at - 1]) == (0x7B, 0x5D):
            self.at -= 1  # the bracket closes the array that the value is in
        return JsonValue(position, self.position - position, record, error)

    def _skip_broken(
        self, position: int, *, ends_here: bool = False, may_go_on: bool = True
    ) -> JsonValue | None:
        """Skip from an invalid value to the next one; return the skipped part.

        None if the value may be valid, or is one that isn't JSON. If its brackets and quotes end it
        (`ends_here`), the next must begin in it. `may_go_on`: it may extend beyond the bytes read.
        """
        start = position - self._dropped
        error = None if start < 0 else _find_error(bytes(self._buffer[start : self.at]), may_go_on)
        is_string = ends_here and self._buffer[start : start + 1] == b'"'
        if is_string:  # maybe it began at the end of one string, and contains the start of another
            error = _Error(1)
        if error is None:
            return None
        self._learn_opening(start)
        end, self.at = self.at if ends_here else None, start + error.place
        where = f"not valid JSON from byte {self.position}"
        behind = max(start + 1, self.at - len(self._opening))
        may_hold_more = not error.is_first and self._find_opening(start + 1, self.at) >= 0
        may_hold_more |= self._seek_opening(behind, end, where)
        if self.at == end and (is_string or not may_hold_more):
            return None
        reason = Reason.UNREADABLE_INPUT if may_hold_more else Reason.BAD_JSON
        where += f"; several documents may lie before byte {self.position}" * may_hold_more
        return JsonValue(position, self.position - position, None, UnusableError(reason, where))

    def _seek_opening(self, start: int, end: int | None, where: str) -> bool:
        """Go to an opening, `end`, or past the last value; whether values may be skipped."""
        may_hold_more = False
        stop = None if end is None else end + len(self._opening) - 1
        while (found := self._find_opening(start, stop)) < 0 and end is None:
            kept = max(self.at, len(self._buffer) - 2 * _LONGEST_OPENING)
            may_hold_more |= bool(_MAYBE_OPENING.search(self._buffer, self.at, kept))
            if not self._fetch(keep_from=kept):
                rest = self._buffer.rstrip()
                if may_hold_more or _MAYBE_OPENING.search(rest) or rest[-1:] not in b"]}":
                    raise DamageError(f"{where} to its end, byte {self._dropped + len(rest)}")
                found = len(rest) - rest.endswith(b"]")
                break
            self.at = start = 0
        found = found if end is None or found >= 0 else end
        # The error may be the line break between a comma and the opening.
        may_hold_more |= bool(_MAYBE_OPENING.search(self._buffer, max(0, self.at - 1), found))
        self.at = found
        return may_hold_more

    def _find_opening(self, start: int, stop: int | None) -> int:
        """Where a value outside another begins like the first; -1 if nowhere."""
        while self._opening and (start := self._buffer.find(self._opening, start, stop)) >= 0:
            before = self._buffer[max(0, start - _LONGEST_OPENING) : start].rstrip()
            if not before.endswith((b":", b"[")):
                return start
            start += 1
        return -1

    def _learn_opening(self, start: int) -> None:
        if not self._opening and (found := _OPENING.match(self._buffer, start)):
            self._opening = found[0] if len(found[0]) <= _LONGEST_OPENING else b""

    def _pass_scalar(self) -> bool:
        found = _AFTER_SCALAR.search(self._buffer, self.at)
        self.at = found.start() if found else len(self._buffer)
        return found is not None

    def _pass_nested(self, state: NDArray[np.int64]) -> bool:
        data = np.frombuffer(self._buffer, np.uint8)
        self.at = int(find_end(data, self.at, state))
        return bool(state[0] == 0 and state[1] == 0)

    def _drop(self, num_bytes: int) -> None:
        del self._buffer[:num_bytes]
        self._dropped += num_bytes
        self.at -= num_bytes

    def _fetch(self, *, keep_from: int | None = None) -> bool:
        """Read more; release what precedes `keep_from`, or the current place."""
        self._drop(self.at if keep_from is None else keep_from)
        data = self._read(_CHUNK_BYTES)
        self._buffer += data
        return bool(data)


class _Error(NamedTuple):
    """A byte at which data isn't JSON; another may precede it in what is too deep for parsers."""

    place: int
    is_first: bool = True


def _find_error(data: bytes, may_go_on: bool) -> _Error | None:
    """Find where data stops being JSON; None if it may be its start."""
    try:
        orjson.loads(data)
        return None
    except orjson.JSONDecodeError as error:
        if error.msg == "unexpected end of data":
            return None
    text = data.decode("utf-8", "surrogateescape")
    try:
        json.JSONDecoder(parse_int=float).raw_decode(text)  # int refuses thousands of digits
    except json.JSONDecodeError as error:
        end = len(text) - _LAST_CHARACTERS * may_go_on
        if error.msg.startswith("Unterminated") or error.pos >= end:
            return None
        return _Error(len(text[: error.pos].encode("utf-8", "surrogateescape")))
    except RecursionError:
        place = _find_mismatch(data)
        return None if place is None else _Error(place, is_first=False)
    return None


def _find_mismatch(data: bytes) -> int | None:
    """Place of a closing bracket of the wrong kind, or None."""
    opened = bytearray()
    for part in _STRING_OR_BRACKET.finditer(data):
        if part[0] in (b"[", b"{"):
            opened += part[0]
        elif part[0] in (b"]", b"}") and opened.pop() != part[0][0] - 2:  # "[" + 2 is "]"
            return part.start()
        if not opened:
            break
    return None
