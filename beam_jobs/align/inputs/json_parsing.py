"""One JSON value, as strict as the required fields need.

Values that no library takes (half surrogate pairs, invalid UTF-8, lists thousands deep, integers of
thousands of digits) cost the document only if its text, id or metadata contains one.
"""

import json
import re
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from beam_jobs.align.inputs.documents import Reason, UnusableError
from pipeline.compiled import compiled

_MAX_DIGITS = 4000  # Python's int takes 4,300
_MAX_DEPTH = 100
"""Of objects that fields lead into; a library takes a thousand."""

_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^\s,\]}]*")


class TooDeep:
    """Replaces a value nested too deeply."""


def parse_json(data: bytes) -> Any:
    r"""Parse JSON and odd values (also NaN and 1e400); UnusableError if invalid.

    Half surrogate pairs stay; invalid UTF-8 is `surrogateescape`d.

    Example:
        >>> parse_json(b'{"text": "fine", "title": "cut \\ud83d"}')["text"]
        'fine'
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        try:
            return _parse_odd(data)
        except (ValueError, RecursionError):
            why = f"{error.msg} at character {error.pos}"
            if "surrogate" in error.msg:  # orjson 3.13, of bytes that aren't UTF-8, too
                why = "it isn't JSON, and not all of it is Unicode"
            raise UnusableError(Reason.BAD_JSON, why) from None


def _parse_odd(data: bytes, depth: int = 0) -> Any:
    try:
        return json.loads(data.decode(errors="surrogateescape"), parse_int=_parse_int)
    except RecursionError:
        return _parse_members(data, depth)


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) < _MAX_DIGITS else float(digits)


def _parse_members(data: bytes, depth: int) -> Any:
    """Parse an object by members; `TooDeep` for anything else."""
    if not data.startswith(b"{") or depth == _MAX_DEPTH:
        if _end_of_value(data, 0) != len(data):
            raise ValueError("its brackets don't match")
        return TooDeep()
    members: dict[str, Any] = {}
    at = _pass_space(data, 1)
    while data[at : at + 1] != b"}":
        end = _end_of_value(data, at)
        name, at = _parse_odd(data[at:end]), _pass_space(data, end)
        if not isinstance(name, str) or data[at : at + 1] != b":":
            raise ValueError("a member without a name")
        at = _pass_space(data, at + 1)
        end = _end_of_value(data, at)
        members[name], at = _parse_odd(data[at:end], depth + 1), _pass_space(data, end)
        if data[at : at + 1] == b",":
            at = _pass_space(data, at + 1)
        elif data[at : at + 1] != b"}":
            raise ValueError("no comma behind a member")
    if _pass_space(data, at + 1) != len(data):
        raise ValueError("more behind the object")
    return members


def _end_of_value(data: bytes, at: int) -> int:
    if data[at : at + 1] in (b'"', b"{", b"["):
        return int(find_end(np.frombuffer(data, np.uint8), at, np.zeros(3, np.int64)))
    found = _SCALAR.match(data, at)
    return found.end() if found else at


def _pass_space(data: bytes, at: int) -> int:
    found = _SPACE.match(data, at)
    return found.end() if found else at


@compiled
def find_end(data: NDArray[np.uint8], start: int, state: NDArray[np.int64]) -> int:
    """Return the end of the value whose brackets and quotes `state` counts, or the data's.

    `state` is depth, in a string, after a backslash; all 0 outside.
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
