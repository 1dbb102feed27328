"""An aligned document as a tar member, a safetensors file, and back.

`schemas/README.md` specifies each tensor.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.errors import RESTORE, DamagedSampleError, DatasetError, SchemaVersionError
from schemas.safetensors_view import read_header, view_tensor

SCHEMA_VERSION: Final = 2
"""Written and read; one number covers manifest, index and sample."""

MEMBER_SUFFIX = ".safetensors"
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors from altered JSON."""

SAMPLE_VERSION = str(SCHEMA_VERSION)
"""In a sample's metadata."""

Layout = tuple[tuple[str, str, int], ...]
"""(name, dtype name, columns) of a sample's tensors in file order; one column has shape [T]."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """One tokenization of a text.

    Attributes:
        input_ids: int64 [T], vocabulary ids.
        byte_offsets: int64 [T, 2], each token's half-open range of the original text's UTF-8 bytes.
    """

    input_ids: NDArray[np.int64]
    byte_offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class StoredSide:
    """One side's rendering in a chat's sample.

    Attributes:
        own_text: the template's own bytes, one text after another.
        pieces: int64 [P, 3], bytes of own text, then the document's range after them.
        learned: int64 [L, 2], half-open ranges of tokens: the student's labels, or the teacher's
            that cover a learned byte.
    """

    own_text: bytes
    pieces: NDArray[np.int64]
    learned: NDArray[np.int64]

    def is_learned(self, num_tokens: int) -> NDArray[np.bool_]:
        """Return which tokens are learned, bool [num_tokens]."""
        found = np.zeros(num_tokens, np.bool_)
        for start, stop in self.learned.tolist():
            found[start:stop] = True
        return found

    def render(self, text: bytes) -> bytes:
        """Render the document's text; ValueError if pieces exceed it or the own text."""
        sizes, starts, stops = self.pieces.T
        if sizes.sum() != len(self.own_text) or stops.max(initial=0) > len(text):
            raise ValueError("pieces don't divide the template's own text, or leave the document")
        ends = np.cumsum(sizes).tolist()
        own = (self.own_text[end - size : end] for end, size in zip(ends, sizes, strict=True))
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        return b"".join(o + text[a:b] for o, (a, b) in zip(own, ranges, strict=True))


@dataclass(frozen=True, eq=False)
class StoredChat:
    """Additional parts of a chat's sample.

    Attributes:
        messages: JSON of its messages without their texts, see `schemas/README.md`.
        learned: int64 [R, 2], learned ranges of the document's bytes.
        student: the student's rendering.
        teacher: the teacher's.
    """

    messages: bytes
    learned: NDArray[np.int64]
    student: StoredSide
    teacher: StoredSide


@dataclass(frozen=True, eq=False)
class AlignedDocument:
    """One text, tokenized by student and teacher and aligned.

    Attributes:
        document_id: from the input, or made from its place there.
        text_sha256: SHA-256 of the text's UTF-8 bytes, 64 hex digits.
        num_text_bytes: length of the text in UTF-8 bytes.
        student: the student's tokens.
        teacher: the teacher's tokens.
        teacher_spans: int64 [T_student, 2], half-open ranges of teacher tokens; empty if unmapped.
        text: UTF-8 bytes; None if not kept.
        chat: a chat's additional parts; None for a text.
    """

    document_id: str
    text_sha256: str
    num_text_bytes: int
    student: Tokens
    teacher: Tokens
    teacher_spans: NDArray[np.int64]
    text: bytes | None = None
    chat: StoredChat | None = None


def document_key(document_id: str) -> str:
    """Return a document's sample key, 32 hex digits.

    Example:
        >>> document_key("doc-1")
        'bb0e4f49443794d901e8969ff11bd112'
    """
    return sha256(document_id.encode()).hexdigest()[:32]


def tiles_text(byte_offsets: NDArray[np.signedinteger[Any]], num_text_bytes: int) -> bool:
    """Whether tokens cover the text without gap or overlap, in order."""
    if len(byte_offsets) == 0:
        return num_text_bytes == 0
    return bool(
        byte_offsets[0, 0] == 0
        and byte_offsets[-1, 1] == num_text_bytes
        and np.array_equal(byte_offsets[1:, 0], byte_offsets[:-1, 1])
    )


def sample_header(
    document_id: str, text_sha256: str, num_text_bytes: int, layout: Layout, places: Sequence[int]
) -> bytes:
    """Return a safetensors header: its length, then JSON padded with spaces to 8 bytes.

    The layout has the widest dtype first, then goes by name. `places` has each tensor's length,
    first byte and end.
    """
    values = (json.dumps(document_id), num_text_bytes, text_sha256, *places)
    text = (_header_template(layout) % values).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def decode_tensors(
    sample: bytes | memoryview,
) -> tuple[dict[str, NDArray[np.unsignedinteger[Any]]], Mapping[str, str]]:
    """Return a sample's tensors as stored, views of `sample`, and its metadata.

    Errors as in `decode_document`.
    """
    try:
        header, body = read_header(sample)
        metadata = header.pop("__metadata__")
        if metadata.get("schema_version") != SAMPLE_VERSION:
            raise SchemaVersionError("sample", metadata.get("schema_version"), SCHEMA_VERSION)
        tensors = {name: view_tensor(sample, body, entry) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except DatasetError:
        raise
    except _UNREADABLE as error:
        raise DamagedSampleError(
            f"sample of {len(sample)} bytes has no readable safetensors header ({error}): it is "
            f"cut or altered; {RESTORE}"
        ) from error
    if body + end != len(sample):
        raise DamagedSampleError(
            f"sample has {len(sample)} bytes, its header describes {body + end}: it is cut "
            f"or altered; {RESTORE}"
        )
    return tensors, metadata


def decode_document(sample: bytes | memoryview) -> AlignedDocument:
    """Decode a sample.

    Raises:
        DamagedSampleError: incomplete sample, or contradictory tensors.
        SchemaVersionError: another version of the format.
    """
    tensors, metadata = decode_tensors(sample)
    try:
        num_text_bytes = int(metadata["num_text_bytes"])
        document = AlignedDocument(
            document_id=metadata["document_id"],
            text_sha256=metadata["text_sha256"],
            num_text_bytes=num_text_bytes,
            student=_decode_tokens("student", tensors, num_text_bytes),
            teacher=_decode_tokens("teacher", tensors, num_text_bytes),
            teacher_spans=decode_spans(tensors["span.advance"], tensors["span.width"]),
            text=tensors["text"].tobytes() if "text" in tensors else None,
            chat=_decode_chat(tensors) if "chat.messages" in tensors else None,
        )
    except _UNREADABLE as error:
        raise DamagedSampleError(
            f"sample lacks or contradicts a field of its version ({error!r}); {RESTORE}"
        ) from error
    check_document(document)
    return document


def check_document(document: AlignedDocument) -> None:
    """Raise DamagedSampleError if arrays contradict each other."""
    size, num_teacher_tokens = document.num_text_bytes, len(document.teacher)
    ends = {
        side: int(tokens.byte_offsets[:, 1].max(initial=0))
        for side, tokens in (("student", document.student), ("teacher", document.teacher))
    }
    last_end = int(document.teacher_spans[:, 1].max(initial=0))
    problem = None
    if document.text is not None and len(document.text) != size:
        problem = f"text has {len(document.text)} bytes, num_text_bytes is {size}"
    elif len(document.teacher_spans) != len(document.student):
        spans = len(document.teacher_spans)
        problem = f"{spans} teacher_spans for {len(document.student)} student tokens"
    elif last_end > num_teacher_tokens:
        problem = f"teacher_spans end {last_end} exceeds {num_teacher_tokens} teacher tokens"
    elif max(ends.values()) > size:
        side = max(ends, key=ends.__getitem__)
        problem = f"{side} byte_offsets end {ends[side]} exceeds {size} bytes of text"
    elif document.chat is not None:
        problem = _chat_problem(document, document.chat)
    if problem is not None:
        raise DamagedSampleError(f'{problem} (document "{document.document_id}"); {RESTORE}')


def _chat_problem(document: AlignedDocument, chat: StoredChat) -> str | None:
    """Describe a chat's ranges that decrease or exceed their bounds, if any."""
    ranges = {"chat.learned": (chat.learned, document.num_text_bytes)}
    for side, own, tokens in (
        ("student", chat.student, document.student),
        ("teacher", chat.teacher, document.teacher),
    ):
        ranges[f"{side}.learned"] = own.learned, len(tokens)
        ranges[f"{side}.pieces"] = own.pieces[:, 1:], document.num_text_bytes
    for name, (found, size) in ranges.items():
        flat = found.reshape(-1)
        if (np.diff(flat) < 0).any() or flat.max(initial=0) > size:
            return f"{name} decrease, or end behind {size}"
    return None


def tokens_over(byte_offsets: NDArray[np.int64], ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens that share a byte with some ranges, as token ranges, int64 [L, 2].

    Both are ascending half-open ranges of one text, int64 [T, 2] and [R, 2].

    Example:
        >>> tokens_over(np.array([[0, 2], [2, 2], [2, 5]]), np.array([[1, 3]])).tolist()
        [[0, 1], [2, 3]]
    """
    if not len(ranges) or not len(byte_offsets):
        return np.empty((0, 2), np.int64)
    starts, stops = ranges.T
    first = np.searchsorted(stops, byte_offsets[:, 0], "right")
    shares = (first < len(starts)) & (byte_offsets[:, 1] > byte_offsets[:, 0])
    shares &= starts[np.minimum(first, len(starts) - 1)] < byte_offsets[:, 1]
    changes = np.diff(np.concatenate([[False], shares, [False]]).astype(np.int8))
    return np.flatnonzero(changes).reshape(-1, 2)


def decode_spans(
    advance: NDArray[np.integer[Any]], width: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Return teacher_spans, int64 [T, 2], from advances and widths; ValueError for unlike shapes.

    An unmapped token advances by 0.
    """
    if advance.shape != width.shape:
        raise ValueError(f"span.advance has shape {advance.shape}, span.width {width.shape}")
    spans = np.empty((len(advance), 2), np.int64)
    np.cumsum(advance, out=spans[:, 0])
    np.add(spans[:, 0], width, out=spans[:, 1])
    return spans


@lru_cache(maxsize=4096)
def _header_template(layout: Layout) -> str:
    metadata = (
        f'"document_id":%s,"num_text_bytes":"%d","schema_version":"{SCHEMA_VERSION}",'
        '"text_sha256":"%s"'
    )
    entries = [f'"__metadata__":{{{metadata}}}']
    for name, dtype, columns in layout:
        shape = "%d" if columns == 1 else f"%d,{columns}"
        entries.append(f'"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[%d,%d]}}')
    return "{" + ",".join(entries) + "}"


def _decode_chat(tensors: Mapping[str, NDArray[np.unsignedinteger[Any]]]) -> StoredChat:
    def table(name: str, columns: int) -> NDArray[np.int64]:
        found = tensors[name].astype(np.int64)
        if found.shape != (len(found), columns):
            raise ValueError(f"{name} has shape {found.shape}")
        return found

    student, teacher = (
        StoredSide(
            tensors[f"{side}.own_text"].tobytes(),
            table(f"{side}.pieces", 3),
            table(f"{side}.learned", 2),
        )
        for side in ("student", "teacher")
    )
    learned = table("chat.learned", 2)
    return StoredChat(tensors["chat.messages"].tobytes(), learned, student, teacher)


def _decode_tokens(
    side: str, tensors: Mapping[str, NDArray[np.unsignedinteger[Any]]], num_text_bytes: int
) -> Tokens:
    input_ids = tensors[f"{side}.input_ids"].astype(np.int64)
    token_bytes = tensors.get(f"{side}.token_bytes")
    if token_bytes is None:
        byte_offsets = tensors[f"{side}.byte_offsets"].astype(np.int64)
    else:
        byte_offsets = np.empty((len(token_bytes), 2), np.int64)
        np.cumsum(token_bytes, out=byte_offsets[:, 1])
        np.subtract(byte_offsets[:, 1], token_bytes, out=byte_offsets[:, 0])
        covered = int(byte_offsets[-1, 1]) if len(byte_offsets) else 0
        if covered != num_text_bytes:
            raise ValueError(f"{side}.token_bytes add up to {covered} of {num_text_bytes} bytes")
    if byte_offsets.shape != (len(input_ids), 2):
        raise ValueError(f"{side} has {len(input_ids)} ids but offsets {byte_offsets.shape}")
    return Tokens(input_ids, byte_offsets)
