"""A chat as one document that two templates render: its own bytes, and proof of their places.

The document is the texts of the messages, one after another. Each side's rendering is *pieces*: own
text of the template, then a range of the document. That is proven for every chat: joined, they must
give the template's rendering, byte for byte; a template may trim white space from a text's ends,
and drop the reasoning of earlier turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import orjson

from pipeline.chats.fitting import Fitted, Texts, fit_chat, share_calls
from pipeline.chats.messages import CALLS, CONTENT, REASONING, Chat, ChatError
from pipeline.chats.turns import Said, Speaker, mark_texts

Learn = Literal["assistant", "last", "all"]
"""Whose texts are learned: assistants', the last assistant's, or everybody's."""

Range = tuple[int, int]
"""Half-open, of bytes. Plain tuples: Python's collector need not look at those again."""

_NOTHING = (0, 0)
_TEXT_FIELDS = (CONTENT, REASONING)


@dataclass(frozen=True)
class LearnRule:
    """The learned part of a chat.

    Attributes:
        learn: whose texts.
        end: whether the end of a learned turn is learned, too.
    """

    learn: Learn = "assistant"
    end: bool = True


@dataclass(frozen=True, eq=False)
class Rendering:
    """One side's rendering of a chat.

    Attributes:
        text: its UTF-8 bytes.
        own: the template's own texts, one before each range and one after the last.
        ranges: the document's ranges between them, ascending.
        places: the start of each range in the text.
        closes: the end of each range's text in the document.
        said: ranges of the text that the side's model must write itself, ascending.
        turn_ends: ends of an assistant's turns before another's message, by the number of the
            message.
    """

    text: bytes
    own: Sequence[bytes]
    ranges: Sequence[Range]
    places: Sequence[int]
    closes: Sequence[int]
    said: Sequence[Range]
    turn_ends: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class RenderedChat:
    """A chat as a document.

    Attributes:
        text: the document's UTF-8 bytes.
        messages: JSON of the messages without their texts, the tools, and for each text its
            message, field and bytes.
        learned: learned ranges of the document: parts of texts that both sides render.
        sides: the student's rendering, and the teacher's.
    """

    text: bytes
    messages: bytes
    learned: tuple[Range, ...]
    sides: tuple[Rendering, Rendering]


def render_chat(chat: Chat, speakers: Sequence[Speaker], rule: LearnRule) -> RenderedChat:
    """Return a chat as a document.

    ChatError, with side, message and field, if a template refuses the chat, or its texts' places
    can't be proven.
    """
    found = [*chat.texts()]
    texts = Texts(found, [text.text.encode() for text in found])
    marked = mark_texts(chat, found)
    fitted = []
    for side, speaker in zip(("student", "teacher"), speakers, strict=True):
        try:
            fitted.append(fit_chat(speaker, chat, texts, marked))
        except ChatError as error:
            raise ChatError(f"{side}: {error}") from error
    messages = _learned_messages(chat, rule)
    texts = share_calls(chat, texts, fitted)
    if not any(texts.data):
        raise ChatError("none of its messages has a text")
    starts = [*accumulate(map(len, texts.data), initial=0)]
    seen = [_seen(each, starts) for each in fitted]
    learned = [
        (max(a[0], b[0]), min(a[1], b[1])) if text.message in messages else _NOTHING
        for text, a, b in zip(texts.texts, *seen, strict=True)
    ]
    turns = _Turns(chat, messages, rule.end, texts, starts, learned)
    return RenderedChat(
        b"".join(texts.data),
        _describe(chat, texts),
        tuple((start, stop) for start, stop in learned if start < stop),
        (_render(fitted[0], seen[0], turns), _render(fitted[1], seen[1], turns)),
    )


def _learned_messages(chat: Chat, rule: LearnRule) -> set[int]:
    if rule.learn == "all":
        return {*range(len(chat.messages))}
    said = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return {*(said[-1:] if rule.learn == "last" else said)}


def _seen(each: Fitted, starts: Sequence[int]) -> list[Range]:
    """Return the document's bytes that a side renders of each text."""
    found = [_NOTHING] * (len(starts) - 1)
    for number, start, stop in each.held:
        found[number] = starts[number] + start, starts[number] + stop
    return found


class _Turns(NamedTuple):
    """The learned part of a chat.

    Attributes:
        chat: the chat.
        messages: the numbers of learned messages.
        end: whether the end of a turn is learned.
        texts: all texts.
        starts: each text's start in the document, and the last one's end.
        learned: the learned range of each text in the document.
    """

    chat: Chat
    messages: set[int]
    end: bool
    texts: Texts
    starts: Sequence[int]
    learned: Sequence[Range]

    def wants(self, said: Said) -> bool:
        if said.message not in self.messages:
            return False
        if said.kind == "end":
            return self.end
        if said.kind != "reasoning":
            return True
        return any(
            start < stop and (t.message, t.field) == (said.message, REASONING)
            for t, (start, stop) in zip(self.texts.texts, self.learned, strict=True)
        )

    def end_before_another(self, number: int) -> bool:
        """Whether a message is an assistant's, not followed by an answer to it."""
        messages = self.chat.messages
        later = messages[number + 1]["role"] if number + 1 < len(messages) else ""
        return messages[number]["role"] == "assistant" and later in ("user", "system")


def _render(each: Fitted, seen: Sequence[Range], turns: _Turns) -> Rendering:
    """Return a side's rendering, with each text as a range of the document."""
    ranges, places, closes, said = list[Range](), list[int](), list[int](), list[Range]()
    at = 0
    for own, (number, _, _) in zip(each.own, each.held, strict=False):
        at += len(own)
        start, stop = seen[number]
        ranges.append((start, stop))
        places.append(at)
        closes.append(turns.starts[number + 1])
        first, end = turns.learned[number]
        if first < end:
            said.append((at + first - start, at + end - start))
        at += stop - start
    turn_ends: dict[int, int] = {}
    for start, stop, of_turn in each.said:
        if of_turn.kind == "end" and turns.end_before_another(of_turn.message):
            turn_ends[of_turn.message] = stop
        if start < stop and turns.wants(of_turn):
            said.append((start, stop))
    said.sort()
    return Rendering(each.rendered, each.own, ranges, places, closes, said, turn_ends)


def _describe(chat: Chat, texts: Texts) -> bytes:
    """Return the messages without their texts, which the document holds."""
    messages = [
        {name: value for name, value in message.items() if name not in _TEXT_FIELDS}
        for message in chat.messages
    ]
    held = [[t.message, t.field, len(d)] for t, d in zip(texts.texts, texts.data, strict=True)]
    return orjson.dumps({"messages": messages, "tools": chat.tools, "texts": held})


def restore_chat(messages: bytes, text: bytes) -> Chat:
    """Restore the chat of a document from `RenderedChat.messages`."""
    body = orjson.loads(messages)
    at = 0
    for number, field, size in body["texts"]:
        if field != CALLS:
            body["messages"][number][field] = text[at : at + size].decode()
        at += size
    return Chat(tuple(body["messages"]), tuple(body["tools"]))
