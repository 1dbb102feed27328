"""Documents of the input, and dead letters for unusable ones.

A document's place is its source and position: byte offset of its line or value in the uncompressed
file, row of a table, number in a dataset's shard, 0 of a text file. It names documents without an
id, and doesn't depend on how files are cut.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from beam_jobs.align.inputs.text_templates import parse_template
from schemas.manifest import MetadataType

LINE_BYTES_PER_TEXT_BYTE = 4
"""JSON escapes make a text at most 3 times longer, control characters aside; the rest is slack for
other fields. A longer line is not parsed, so one huge line can't fill a worker's memory."""

Value = str | int | float | bool | None
"""Of a metadata field."""


class Reason(StrEnum):
    """Why a document isn't a sample: codes in `dead_letters.jsonl`."""

    BAD_JSON = "bad_json"
    BAD_ROW = "bad_row"
    MISSING_TEXT = "missing_text"
    TEXT_NOT_A_STRING = "text_not_a_string"
    EMPTY_TEXT = "empty_text"
    BAD_CHAT = "bad_chat"
    RENDERING_FAILED = "rendering_failed"
    INVALID_UNICODE = "invalid_unicode"
    BAD_ID = "bad_id"
    BAD_METADATA = "bad_metadata"
    TOO_LARGE = "too_large"
    UNREADABLE_INPUT = "unreadable_input"
    NOTHING_USABLE = "nothing_usable"
    TEXT_LOST = "text_lost"
    DUPLICATE_ID = "duplicate_id"
    KNOWN_ID = "known_id"
    TOKENIZATION_FAILED = "tokenization_failed"


class DeadLetter(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """A document, or an unread part of a damaged file, that can't be used.

    Never holds text. `line` counts from 1 in a part of JSON lines, else None. `first_line` is that
    of the first document with this id.
    """

    source: str
    position: int
    document_id: str | None
    reason: Reason
    detail: str
    line: int | None = None
    first_line: int | None = None


class PlacedDocument(msgspec.Struct, frozen=True, array_like=True, tag="document"):
    """A usable document, with a value per field of `ReadingRules.metadata`."""

    source: str
    position: int
    document_id: str
    text: bytes
    metadata: tuple[Value, ...] = ()
    line: int | None = None

    def refuse(self, reason: Reason, detail: str, *, first_line: int | None = None) -> DeadLetter:
        """A dead letter at this place."""
        place = self.source, self.position, self.document_id
        return DeadLetter(*place, reason, detail, self.line, first_line)


Outcome = PlacedDocument | DeadLetter
"""Result of reading a document."""


class UnusableError(ValueError):
    """Why a document can't be used, for a dead letter."""

    def __init__(self, reason: Reason, detail: str) -> None:
        """Take a dead letter's reason and detail."""
        # Names in a record may hold bytes that aren't UTF-8, as lone surrogates.
        detail = detail.encode(errors="backslashreplace").decode()
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def describe_value(value: object) -> str:
    """Say what doesn't fit: a number itself, of anything else the type.

    JSON's integers beyond 64 bits are floats here.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"the number {value!r:.40}"
    return f"of type {type(value).__name__}"


def unreadable(error: BaseException, num_bytes: int, num_read: int | None) -> UnusableError:
    """Say that a file is unreadable after byte `num_read`, None if unknown."""
    left = 0 if num_read is None else num_bytes - num_read
    lost = f"up to {left} of {num_bytes} bytes" if left else "the rest of the file"
    return UnusableError(Reason.UNREADABLE_INPUT, f"{lost} can't be read: {error}")


@dataclass(frozen=True)
class MetadataField:
    """A field stored with each document; dots lead into nested ones.

    Until `type` is known, values pass unchanged.
    """

    name: str
    type: MetadataType | None = None


@dataclass(frozen=True)
class ReadingRules:
    """What counts as a document.

    Fields are a JSON object's or a row's; dots lead into nested ones. Without an id field,
    documents are named by place. A template (`parse_template`) replaces the text field.
    `max_document_bytes` are of UTF-8. With a messages field, texts are chats as JSON
    (`pipeline.chats.messages.Chat.encode`).
    """

    text_field: str = "text"
    id_field: str = "id"
    max_document_bytes: int = 16 << 20
    text_template: str = ""
    metadata: tuple[MetadataField, ...] = ()
    messages_field: str = ""
    tools_field: str = ""

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Fields that make a text or chat."""
        if self.messages_field:
            return (self.messages_field, *filter(None, [self.tools_field]))
        if not self.text_template:
            return (self.text_field,)
        return tuple(part.field for part in parse_template(self.text_template) if part.field)

    @property
    def max_line_bytes(self) -> int:
        """Longest JSON line that is parsed."""
        return LINE_BYTES_PER_TEXT_BYTE * self.max_document_bytes
