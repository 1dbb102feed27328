"""JSON records, read strictly.

Every field must be present, with its dataclass's type and bounds; undeclared fields are ignored.
Strings are UTF-8, numbers finite.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schemas.errors import DatasetError, SchemaVersionError

_SHA256_PATTERN = "^[0-9a-f]{64}$"
# Refuses, in this order: absolute; only "." and "/"; a part ".."; a backslash or a URL.
_PATH_PATTERN = r"^(?!/)(?!(?:\.(?:/+|$))*$)(?!(?:[\s\S]*/)?\.\.(?:/|$))(?![\s\S]*(?:\\|://))[\s\S]"
_PATTERNS_IN_WORDS = {
    _SHA256_PATTERN: "a SHA-256, 64 lower-case hexadecimal digits",
    _PATH_PATTERN: "a path inside the dataset, relative, with / and without ..",
}

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0)]
# max_length: Python's `$` allows a line end after the digits.
Sha256 = Annotated[str, Meta(pattern=_SHA256_PATTERN, max_length=64)]
FilePath = Annotated[
    str,
    Meta(
        pattern=_PATH_PATTERN,
        extra_json_schema={"$comment": "Forward slashes only; never leaves the folder; no URL."},
    ),
]
Name = Annotated[str, Meta(min_length=1)]


class RecordError(ValueError):
    """JSON doesn't hold the expected record; the message gives what and where."""


@dataclass(frozen=True)
class Format:
    """A kind of JSON file; its job writes and reads `version`, and those in `also`."""

    name: str
    version: int
    job: str
    also: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Envelope:
    schema: object = None
    schema_version: object = None


def read_record[Record](data: bytes | str, kind: type[Record]) -> Record:
    """Read a record from JSON; RecordError if it has another shape."""
    try:
        if isinstance(data, bytes):
            data.decode()  # msgspec does not hold fields that it ignores against UTF-8
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        message = str(error)
        for pattern, words in _PATTERNS_IN_WORDS.items():
            message = message.replace(f"`str` matching regex {pattern!r}", words)
        raise RecordError(message) from error


def write_record(record: object) -> str:
    """Write a record as one line of JSON, always the same; ValueError for non-finite numbers."""
    return json.dumps(record, sort_keys=True, allow_nan=False, default=vars)


def write_file(body: Mapping[str, Any]) -> bytes:
    """Write a JSON file for people; equal bodies give equal bytes.

    The standard library defines them: msgspec writes 1e-05 and empty lists differently. ValueError
    for non-finite numbers.
    """
    return (
        json.dumps(
            body, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False, default=vars
        )
        + "\n"
    ).encode()


def require_format(data: bytes, expected: Format, *, at: str, remedy: str) -> None:
    """Check a file's format and version.

    RecordError without a JSON object, DatasetError or SchemaVersionError for another format or
    version.
    """
    envelope = read_record(data, _Envelope)
    if envelope.schema != expected.name:
        raise DatasetError(f"{at} isn't a {expected.name} manifest; {remedy}")
    version = envelope.schema_version
    if version not in (expected.version, *expected.also) or isinstance(version, bool):
        raise SchemaVersionError(at, version, expected.version, job=expected.job)
