"""A chat as one document that two templates render, with its texts' places proven.

The document is the messages' texts, joined. A side's *pieces* are an own text of the template, then
a range of the document. Joined, they must give the template's rendering; a template may trim white
space at a text's ends, and drop the reasoning of earlier turns.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import orjson

from pipeline.chats.fitting import Fitted, Texts, fit_chat, share_calls
from pipeline.chats.habits import Speaker
from pipeline.chats.messages import CALLS, CONTENT, REASONING, WEIGHT, Chat, ChatError
from pipeline.chats.turns import Said, mark_texts

Learn = Literal["assistant", "last", "all"]
"""Texts to learn: assistants', the last assistant's, or all."""

Range = tuple[int, int]
"""Half-open, of bytes. Plain tuples: Python's collector need not look at those again."""

_NOTHING = (0, 0)
_TEXT_FIELDS = (CONTENT, REASONING)


@dataclass(frozen=True)
class LearnRule:
    """The learned part of a chat; `end` includes ends of turns."""

    learn: Learn = "assistant"
    end: bool = True


@dataclass(frozen=True, eq=False)
class Rendering:
    """One side's rendering of a chat.

    Attributes:
        own_text: the template's own texts, joined.
        pieces: each own text's size and the document's range after it, empty after the last.
        closes: the end of each range's text.
        said: ranges that the side's model must write, ascending.
        turn_ends: ends of an assistant's turns before another's, by message.
    """

    text: bytes
    own_text: bytes
    pieces: Sequence[tuple[int, int, int]]
    closes: Sequence[int]
    said: Sequence[Range]
    turn_ends: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class RenderedChat:
    """A chat as a document, with the student's and the teacher's rendering.

    Attributes:
        messages: JSON of the messages without their texts, the tools, and each text's message,
            field and size.
        learned: learned ranges of texts that both sides render.
    """

    text: bytes
    messages: bytes
    learned: tuple[Range, ...]
    sides: tuple[Rendering, Rendering]


def render_chat(chat: Chat, speakers: Sequence[Speaker], rule: LearnRule) -> RenderedChat:
    """Render a chat as a document; ChatError, with side and field, if it can't be proven."""
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
    for side, own in zip(("student", "teacher"), fitted, strict=True):
        if not own.held and any(each.held for each in fitted):
            raise ChatError(f"{side}: the chat template shows none of its texts")
    starts = [*accumulate(map(len, texts.data), initial=0)]
    seen = [_seen(each, starts) for each in fitted]
    learned = [
        (max(a[0], b[0]), min(a[1], b[1])) if text.message in messages else _NOTHING
        for text, a, b in zip(texts.texts, *seen, strict=True)
    ]
    thoughts = {
        text.message
        for text, (start, stop) in zip(texts.texts, learned, strict=True)
        if text.field == REASONING and start < stop
    }
    part = _Learned(learned, messages, thoughts, end=rule.end)
    return RenderedChat(
        b"".join(texts.data),
        _describe(chat, texts),
        tuple(each for each in learned if each[0] < each[1]),
        (_render(fitted[0], seen[0], starts, part), _render(fitted[1], seen[1], starts, part)),
    )


def _learned_messages(chat: Chat, rule: LearnRule) -> set[int]:
    found = [*range(len(chat.messages))]
    if rule.learn != "all":
        found = [number for number in found if chat.messages[number]["role"] == "assistant"]
    if rule.learn == "last":
        found = found[-1:]
    return {number for number in found if chat.messages[number].get(WEIGHT, 1)}


def _seen(each: Fitted, starts: Sequence[int]) -> list[Range]:
    """Return the document's range that a side renders of each text."""
    found = [_NOTHING] * (len(starts) - 1)
    for number, start, stop in each.held:
        found[number] = starts[number] + start, starts[number] + stop
    return found


class _Learned(NamedTuple):
    """Learned ranges of texts, and messages; `thoughts` have reasoning."""

    ranges: Sequence[Range]
    messages: Set[int]
    thoughts: Set[int]
    end: bool

    def wants(self, said: Said) -> bool:
        if said.message not in self.messages:
            return False
        if said.kind == "end":
            return self.end
        return said.kind != "reasoning" or said.message in self.thoughts


def _render(
    each: Fitted, seen: Sequence[Range], starts: Sequence[int], learned: _Learned
) -> Rendering:
    """Return a side's rendering; `starts` are texts' in the document, and the last end."""
    pieces, closes, said = list[tuple[int, int, int]](), list[int](), list[Range]()
    at = stop = 0
    for own, (number, _, _) in zip(each.own, each.held, strict=False):
        start, stop = seen[number]
        at += len(own) - start
        pieces.append((len(own), start, stop))
        closes.append(starts[number + 1])
        first, end = learned.ranges[number]
        if first < end:
            said.append((at + first, at + end))
        at += stop
    pieces.append((len(each.own[-1]), stop, stop))
    closes.append(stop)
    said += ((a, b) for a, b, of_turn in each.said if a < b and learned.wants(of_turn))
    said.sort()
    turn_ends = {of_turn.message: b for _, b, of_turn in each.said if of_turn.hands_over}
    return Rendering(each.rendered, b"".join(each.own), pieces, closes, said, turn_ends)


def _describe(chat: Chat, texts: Texts) -> bytes:
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
