"""Turn a JSON object, a table's row or a text into a document or a dead letter."""

import math
from collections.abc import Mapping
from typing import Any

from beam_jobs.align.inputs.documents import (
    DeadLetter,
    Outcome,
    PlacedDocument,
    ReadingRules,
    Reason,
    UnusableError,
    Value,
    describe_value,
)
from beam_jobs.align.inputs.fields import describe_others
from beam_jobs.align.inputs.metadata import fit_value
from beam_jobs.align.inputs.text_templates import parse_template
from beam_jobs.first_bytes import why_not_utf8
from pipeline.chats.messages import ChatError, read_chat

_MAX_EXACT_FLOAT = float(1 << 53)


def place_record(
    record: Any,
    rules: ReadingRules,
    *,
    source: str,
    position: int,
    line: int | None = None,
    is_text: bool = False,
) -> Outcome:
    """Place a JSON object or a table's row; `is_text`: all values are text."""
    document_id = None
    try:
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise UnusableError(Reason.BAD_JSON, f"the line holds a JSON {kind}, not an object")
        document_id = _find_id(record, rules) or f"{source}#{position}"
        text = _find_chat(record, rules) if rules.messages_field else _find_text(record, rules)
        values = _fit_metadata(record, rules, is_text=is_text)
        return PlacedDocument(source, position, document_id, text, values, line)
    except UnusableError as unusable:
        why = unusable.reason, unusable.detail
        return DeadLetter(source, position, document_id, *why, line)


def place_text(
    text: bytes,
    values: Mapping[str, Any],
    rules: ReadingRules,
    *,
    source: str,
    position: int,
    document_id: str,
) -> Outcome:
    """Place a text with its id and metadata values."""
    try:
        data, metadata = _check_text(text, "text", rules), _fit_metadata(values, rules)
        return PlacedDocument(source, position, document_id, data, metadata)
    except UnusableError as unusable:
        return DeadLetter(source, position, document_id, unusable.reason, unusable.detail)


def _look_up(record: Mapping[str, Any], field: str) -> Any:
    if field in record:
        return record[field]
    value: Any = record
    for name in field.split("."):
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            value = dict(value)  # a map of parquet or Arrow
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _find_id(record: Mapping[str, Any], rules: ReadingRules) -> str | None:
    value = _look_up(record, rules.id_field) if rules.id_field else None
    if value is None:
        return None
    if isinstance(value, bytes):
        value = _decode(value)
    if isinstance(value, str):
        _encode(value, rules.id_field)
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return None  # a missing number in pandas
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT:
        return str(int(value))  # pandas stores integers as floats if one is missing
    what = "bytes that aren't UTF-8" if isinstance(value, bytes) else describe_value(value)
    detail = f'"{rules.id_field}" is {what}, not a string or an integer of 64 bits'
    raise UnusableError(Reason.BAD_ID, detail)


def _find_text(record: Mapping[str, Any], rules: ReadingRules) -> bytes:
    if not rules.text_template:
        value = _look_up(record, rules.text_field)
        return _check_text(value, rules.text_field, rules, record=record)
    text = ""
    for literal, field in parse_template(rules.text_template):
        text += literal
        if field:
            own: Any = _look_up(record, field)
            own = _decode(own) if isinstance(own, bytes) else own
            if not isinstance(own, str):
                _check_text(own, field, rules, record=record)  # says what is wrong with it
            text += own
    return _check_text(text, rules.text_template, rules)


def _find_chat(record: Mapping[str, Any], rules: ReadingRules) -> bytes:
    messages = _look_up(record, rules.messages_field)
    if messages is None:
        others = describe_others(record, rules.messages_field, is_text_field=False)
        detail = f'no "{rules.messages_field}" in the record{others}'
        raise UnusableError(Reason.MISSING_TEXT, detail)
    tools = _look_up(record, rules.tools_field) if rules.tools_field else None
    try:
        chat = read_chat(messages, tools)
    except ChatError as error:
        raise UnusableError(Reason.BAD_CHAT, str(error)) from None
    if not any(text.text for text in chat.texts()):
        raise UnusableError(Reason.EMPTY_TEXT, "none of its messages has a text")
    return _check_text(chat.encode(), rules.messages_field, rules)


def _check_text(
    text: Any, field: str, rules: ReadingRules, *, record: Mapping[str, Any] | None = None
) -> bytes:
    if text is None or (isinstance(text, float) and math.isnan(text)):
        others = describe_others(record or {}, field, is_text_field=not rules.text_template)
        raise UnusableError(Reason.MISSING_TEXT, f'no "{field}" in the record{others}')
    if not isinstance(text, str | bytes):
        kind = type(text).__name__
        raise UnusableError(Reason.TEXT_NOT_A_STRING, f'"{field}" is of type {kind}')
    data = _encode(text, field) if isinstance(text, str) else text
    if not data:
        raise UnusableError(Reason.EMPTY_TEXT, "the text has no characters")
    if len(data) > rules.max_document_bytes:
        raise UnusableError(
            Reason.TOO_LARGE,
            f"text of {len(data)} bytes exceeds --max-document-bytes {rules.max_document_bytes}",
        )
    if data is text:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            detail = why_not_utf8(data[:4]) or f"{error.reason} at byte {error.start}"
            raise UnusableError(Reason.INVALID_UNICODE, detail) from None
    return data


def _fit_metadata(
    record: Mapping[str, Any], rules: ReadingRules, *, is_text: bool = False
) -> tuple[Value, ...]:
    values = []
    for field in rules.metadata:
        value = _look_up(record, field.name)
        value = _decode(value) if isinstance(value, bytes) else value
        value = fit_value(field, value, is_text=is_text)
        if isinstance(value, str):
            _encode(value, field.name)
        values.append(value)
    return tuple(values)


def _decode(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _encode(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Readers replace bytes that aren't UTF-8 by U+DC80 to U+DCFF.
        is_byte = 0xDC80 <= code <= 0xDCFF
        what = f"byte {code & 0xFF:#x}" if is_byte else f"half a surrogate pair, U+{code:X},"
        detail = f'"{field}" has {what} at character {error.start}, which is not UTF-8'
        raise UnusableError(Reason.INVALID_UNICODE, detail) from None
