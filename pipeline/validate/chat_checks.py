"""Rules for chats: origins, learned ranges, both renderings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pipeline.batches import TokenBatch
from pipeline.chats.chat_alignment import count_controls
from pipeline.chats.habits import Speaker
from pipeline.chats.kernels import find_origins, mark_overlaps
from pipeline.chats.messages import ChatError
from pipeline.chats.rendering import LearnRule, render_chat, restore_chat
from pipeline.dataset.chat_index import count_learned
from schemas.document import AlignedDocument, StoredSide, tokens_over

Speakers = tuple[tuple[Speaker, Speaker], LearnRule]
"""Both sides' templates, and the rule for what is learned."""

_NOWHERE = np.empty((0, 3), np.int64), np.empty(0, np.int64)
RENDERED_AGAIN = 32
"""Chats of each window that are rendered again; jinja is slow."""

ANOTHER_RELEASE = "if another release made it, align the conversations again"
"""The remedy: what is learned of a chat may change from release to release."""


def find_wrong_parts(document: AlignedDocument) -> Iterator[str]:
    """Yield contradictions in learned ranges, tokens and pieces."""
    chat, text = document.chat, document.text
    if chat is None:
        yield "it has no tensors of a chat"
        return
    if text is None:
        yield "its text is not kept"
        return
    for side, own, tokens in (
        ("student", chat.student, document.student),
        ("teacher", chat.teacher, document.teacher),
    ):
        try:
            own.render(text)
        except ValueError as error:
            yield f"{side}.{error}"
        over = tokens_over(tokens.byte_offsets, chat.learned)
        wanted, found = (np.zeros(len(tokens), np.bool_) for _ in range(2))
        for ranges, marks in ((over, wanted), (own.learned, found)):
            for start, stop in ranges.tolist():
                marks[start:stop] = True
        if (wanted & ~found).any():
            first = int(np.argmax(wanted & ~found))
            yield f"{side} token {first} covers learned bytes and is not in {side}.learned"
    try:
        restore_chat(chat.messages, text)
    except (ValueError, LookupError, TypeError) as error:
        yield f"chat.messages don't belong to its text ({error!r})"


def find_other_rendering(document: AlignedDocument, speakers: Speakers) -> str | None:
    """Describe how a new rendering differs, None if it doesn't."""
    chat, text = document.chat, document.text
    assert chat is not None
    assert text is not None
    try:
        again = render_chat(restore_chat(chat.messages, text), *speakers)
    except ChatError as error:
        return f"it can't be rendered again: {error}"
    if again.text != text or again.messages != chat.messages:
        return "its messages, rendered again, make up another document"
    if not np.array_equal(_array(again.learned), chat.learned):
        return "other bytes are learned if it is rendered again"
    for place, side in enumerate(("student", "teacher")):
        if again.sides[place].text != getattr(chat, side).render(text):
            return f"the {side}'s template renders it otherwise"
    return None


def find_other_labels(
    documents: Sequence[AlignedDocument], tokens: TokenBatch, speakers: Speakers
) -> Iterator[tuple[int, str]]:
    """Yield chats whose student learns other tokens if they are rendered again.

    `tokens` are of the student's renderings, with offsets in these.
    """
    for d, document in enumerate(documents[:RENDERED_AGAIN]):
        chat, (first, stop) = document.chat, tokens.cu_tokens[d : d + 2]
        if chat is None or document.text is None or stop - first != len(document.student):
            continue
        try:
            again = render_chat(restore_chat(chat.messages, document.text), *speakers)
        except ChatError:  # told by `find_other_rendering`
            continue
        said, offsets = _array(again.sides[0].said), tokens.byte_offsets[first:stop]
        whole, all_said = (np.array([0, len(each)]) for each in (offsets, said))
        marks = mark_overlaps(offsets, whole, said, all_said)
        other = marks != chat.student.is_learned(len(marks))
        if other.any():
            place = int(np.argmax(other))
            is_learned = "is learned" if marks[place] else "isn't learned"
            yield d, f"student token {place} {is_learned} if it is rendered again"


def counts_of(document: AlignedDocument, speakers: Speakers) -> Mapping[str, int]:
    """Return a chat's counts, as the index should have them."""
    assert document.chat is not None
    assert document.text is not None
    num_bytes, student, teacher = count_learned(document.chat)
    names = tuple(name for speaker in speakers[0] for name in speaker.controls)
    return {
        "num_learned_bytes": num_bytes,
        "num_learned_student_tokens": student,
        "num_learned_teacher_tokens": teacher,
        "num_control_strings": count_controls(document.text, names),
    }


def renderings_of(documents: Sequence[AlignedDocument], side: str) -> list[bytes]:
    """Return the tokenized texts: chats' renderings, or texts."""
    found = []
    for document in documents:
        text = document.text or b""
        chat = document.chat
        found.append(text if chat is None else getattr(chat, side).render(text))
    return found


def with_origins(tokens: TokenBatch, documents: Sequence[AlignedDocument], side: str) -> TokenBatch:
    """Replace a rendering's byte offsets by the document's."""
    found = [
        _NOWHERE if d.chat is None else _pieces_of(getattr(d.chat, side), d.chat.messages)
        for d in documents
    ]
    cu_pieces = np.cumsum([0, *(len(pieces) for pieces, _ in found)], dtype=np.int64)
    pieces, closes = map(np.concatenate, zip(_NOWHERE, *found, strict=True))
    offsets = tokens.byte_offsets.astype(np.int32)
    origins = find_origins(offsets, tokens.cu_tokens, pieces, cu_pieces, closes)
    of_chat = np.array([d.chat is not None for d in documents], np.bool_)
    own = np.where(np.repeat(of_chat, np.diff(tokens.cu_tokens))[:, None], origins, offsets)
    return TokenBatch(
        tokens.input_ids, own, tokens.cu_tokens, tokens.tiles, failures=tokens.failures
    )


def _pieces_of(side: StoredSide, messages: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pieces, and where their texts end in the document."""
    ends = np.cumsum([0, *(text[2] for text in orjson.loads(messages)["texts"])], dtype=np.int64)
    closes = ends[np.searchsorted(ends, side.pieces[:, 2], "left").clip(0, len(ends) - 1)]
    return side.pieces, closes


def _array(ranges: Sequence[Any]) -> NDArray[np.int64]:
    return np.array(ranges, np.int64).reshape(-1, 2)
