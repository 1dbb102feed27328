"""Suggestions for a missing field."""

import json
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

from pipeline.drawing.formatting import format_count

_MAX_NAMED = 8
_MAX_CHARACTERS = 40
_MAX_DEPTH = 3
_OF_SHAREGPT = (
    '{messages: [%s[] | {role: ({"human": "user", "gpt": "assistant"}[.from] // .from), '
    "content: .value}]}"
)


def describe_others(record: Mapping[str, Any], field: str, *, is_text_field: bool = True) -> str:
    """Name the fields a record has instead, with a remedy; "" if the field is there but empty.

    Example:
        >>> describe_others({"id": 7, "content": "one two"}, "text")
        ', which has "id" and "content": --text-field content has the longest string'
    """
    if field in record or field.split(".")[0] in record:
        return ""
    told = f", which has {name_fields(list(record))}"
    if within := _objects_within(record):
        return f"{told}: {within}"
    longest = longest_string(record)
    if longest and is_text_field:
        return f"{told}: --text-field {quote(longest)} has the longest string"
    return told


def name_fields(names: Sequence[str]) -> str:
    """List names in a sentence.

    Example:
        >>> name_fields(["id", "title", "content"])
        '"id", "title" and "content"'
    """
    named = [f'"{_shorten(name)}"' for name in names[:_MAX_NAMED]]
    if len(names) > _MAX_NAMED:
        named.append(f"{format_count(len(names) - _MAX_NAMED)} more")
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]])) or "no field"


def longest_string(record: Mapping[str, Any]) -> str | None:
    """The dotted field with the longest string, if any.

    Example:
        >>> longest_string({"id": "a7", "meta": {"body": "one two"}})
        'meta.body'
    """
    found = list(_strings(record, "", _MAX_DEPTH))
    return max(found, key=lambda each: each[1])[0] if found else None


def _strings(record: Mapping[str, Any], before: str, depth: int) -> Iterator[tuple[str, int]]:
    for name, value in record.items():
        if isinstance(value, str | bytes) and name.isprintable():
            yield before + name, len(value)
        elif isinstance(value, dict) and depth > 1:
            yield from _strings(value, f"{before}{name}.", depth - 1)


def _objects_within(record: Mapping[str, Any]) -> str:
    """Remedy for nested objects."""
    for name, value in record.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            path = (
                f".{name}" if name.isidentifier() and name.isascii() else f".[{json.dumps(name)}]"
            )
            if "role" in value[0]:
                return f'"{_shorten(name)}" is a conversation: --messages {quote(name)}'
            if "from" in value[0] and "value" in value[0]:
                return (
                    f'"{_shorten(name)}" is a conversation in ShareGPT\'s form: '
                    f"jq -c {quote(_OF_SHAREGPT % path)} makes lines for --messages messages"
                )
            return (
                f'"{_shorten(name)}" is a list of {format_count(len(value))} objects, of which '
                f"jq -c {quote(f'{path}[]')} makes lines"
            )
    if len(record) > 1 and all(isinstance(each, dict) for each in record.values()):
        return "each is an object, of which jq -c '.[]' makes lines"
    return ""


def _shorten(name: str) -> str:
    shown = name if name.isprintable() else ascii(name)[1:-1]
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:_MAX_CHARACTERS]}…"
