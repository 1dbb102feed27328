"""A chat as one document that two templates render: its own bytes, and proof of where they are.

The document is the texts of the messages, one after another. Each side's rendering is *pieces*: own
text of the template, then a range of the document. That is proven for every chat: own texts and
texts, put together, must give what the template renders, byte for byte; a template may take white
space from a text's ends, and drop the reasoning of earlier turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from pipeline.chats.messages import CALLS, REASONING, Chat, ChatError, Text
from pipeline.chats.templates import to_json
from pipeline.chats.turns import Said, Shape, Speaker, find_shape

Learn = Literal["assistant", "last", "all"]
"""Whose texts are learned: assistants', the last assistant's, or everybody's."""

REASONING_MARKS = "reasoning"
_TEXT_FIELDS = ("content", REASONING)


@dataclass(frozen=True)
class LearnRule:
    """What of a chat is learned.

    Attributes:
        learn: whose texts.
        end: whether what ends a turn is learned behind one.
    """

    learn: Learn = "assistant"
    end: bool = True


class Range(NamedTuple):
    """A half-open range of bytes."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Rendering:
    """One side's rendering of a chat.

    Attributes:
        text: its UTF-8 bytes.
        own: the template's own texts, one before each range and one behind the last.
        ranges: int64 [R, 2], of the document, which come between them.
        places: int64 [R], where each range starts in the text.
        closes: int64 [R], where the document's text that each range is of ends.
        said: ranges of the text that the side's model has to say itself, ascending.
        turn_ends: where turns of an assistant end behind which another's message comes, by the
            number of the message.
    """

    text: bytes
    own: tuple[bytes, ...]
    ranges: NDArray[np.int64]
    places: NDArray[np.int64]
    closes: NDArray[np.int64]
    said: tuple[Range, ...]
    turn_ends: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class RenderedChat:
    """A chat as a document.

    Attributes:
        text: the document's UTF-8 bytes.
        messages: JSON of the messages without their texts, the tools, and for each text its
            message, field and bytes.
        learned: ranges of the document that are learned: parts of texts that both sides render.
        sides: the student's rendering, and the teacher's.
    """

    text: bytes
    messages: bytes
    learned: tuple[Range, ...]
    sides: tuple[Rendering, Rendering]


def render_chat(chat: Chat, speakers: Sequence[Speaker], rule: LearnRule) -> RenderedChat:
    """Return a chat as a document.

    ChatError if a template refuses the chat, or where its texts are can't be proven; it names side,
    message and field.
    """
    fitted = []
    for side, speaker in zip(("student", "teacher"), speakers, strict=True):
        try:
            fitted.append(_fit(speaker, chat))
        except ChatError as error:
            raise ChatError(f"{side}: {error}") from error
    learned = _learned_messages(chat, rule)
    texts = _with_calls(chat, fitted)
    data = [text.text.encode() for text in texts]
    if not any(data):
        raise ChatError("none of its messages has a text")
    starts = np.cumsum([0, *map(len, data)]).tolist()
    seen = [_seen(each, texts, data, starts) for each in fitted]
    shared = [Range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(*seen, strict=True)]
    own = [r if t.message in learned else Range(0, 0) for t, r in zip(texts, shared, strict=True)]
    turns = _Turns(learned, rule.end, texts, starts, own)
    sides = tuple(
        _render(each, chat, ranges, turns) for each, ranges in zip(fitted, seen, strict=True)
    )
    return RenderedChat(
        b"".join(data),
        _describe(chat, texts, data),
        tuple(r for r in own if r.start < r.stop),
        (sides[0], sides[1]),
    )


class _Piece(NamedTuple):
    """Part of a rendering: own text, or characters start to stop of a text, by its number."""

    own: str
    text: int = -1
    start: int = 0
    stop: int = 0


@dataclass
class _Fitted:
    """A rendering in characters; each text is named by message and field."""

    rendered: str
    shape: Shape
    texts: list[Text]
    pieces: list[_Piece]
    said: list[tuple[int, int, Said]]


def _fit(speaker: Speaker, chat: Chat) -> _Fitted:
    """Return a chat's rendering with the place of each of its texts, proven."""
    texts, shape = [*chat.texts()], find_shape(speaker, chat)
    rendered = speaker.template.render(chat.messages, chat.tools)
    pieces: list[_Piece] = []
    firsts, at = [], 0
    for place, number in enumerate((*shape.texts, -1)):
        own = shape.own[place]
        if not rendered.startswith(own, at):
            raise _changed(texts, shape, place, "what it puts behind")
        firsts.append(at)
        at += len(own)
        pieces.append(_Piece(own))
        if number >= 0:
            text, behind = texts[number].text, shape.own[place + 1]
            forms = [f for f in _forms(text) if rendered.startswith(text[f[0] : f[1]], at)]
            if not forms:
                raise _changed(texts, shape, place + 1, "")
            for start, stop in forms:
                end = at + stop - start
                if rendered.startswith(behind, end):
                    break
            else:
                raise _changed(texts, shape, place + 1, "what it puts behind")
            pieces.append(_Piece("", number, start, stop))
            at = end
    if at != len(rendered):
        raise _changed(texts, shape, len(shape.texts), "what it puts behind")
    said = [(firsts[s.own] + s.start, firsts[s.own] + s.stop, s) for s in shape.said]
    return _Fitted(rendered, shape, texts, pieces, said)


def _changed(texts: Sequence[Text], shape: Shape, place: int, what: str) -> ChatError:
    """Return the error for a rendering in which a text, or what is behind it, is another."""
    number = shape.texts[max(0, place - 1)]
    near, more = texts[number], ""
    if any("</think>" in text.text for text in texts[number : number + 2]):
        more = "; a text holds </think>: give what was thought as reasoning_content"
    told = f"{what} the {near.field} of message {near.message}".strip()
    return ChatError(
        "putting the texts back doesn't give what the chat template renders: "
        f"{told} changes with the texts{more}"
    )


def _forms(text: str) -> Iterator[tuple[int, int]]:
    """Yield what templates make of a text: all of it, or less white space at its ends."""
    size = len(text)
    yield 0, size
    if text and (text[0].isspace() or text[-1].isspace()):
        for blank in (None, "\n"):
            start, stop = size - len(text.lstrip(blank)), len(text.rstrip(blank))
            yield start, stop
            yield 0, stop
            yield start, size


def _learned_messages(chat: Chat, rule: LearnRule) -> set[int]:
    if rule.learn == "all":
        return {*range(len(chat.messages))}
    said = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return {*(said[-1:] if rule.learn == "last" else said)}


def _with_calls(chat: Chat, fitted: Sequence[_Fitted]) -> list[Text]:
    """Return all texts, the calls of tools that both sides render alike among them.

    Their bytes are the templates'; of calls that they write in two ways, the arguments may be.
    """
    texts = [*chat.texts()]
    added: list[tuple[Text, list[tuple[int, int]]]] = []
    for number, message in enumerate(chat.messages):
        if CALLS not in message:
            continue
        found = [_calls_of(each, number) for each in fitted]
        if None in found:
            continue
        for each in _shared(message[CALLS], fitted, found):
            added.append((Text(number, CALLS, fitted[0].rendered[slice(*each[0])]), each))
    if not added:
        return texts
    texts = sorted([*texts, *(text for text, _ in added)], key=lambda text: text.message)
    for side, rendered in enumerate(fitted):
        _renumber(rendered, texts)
        for text, ranges in added:
            _cut_out(rendered, next(n for n, t in enumerate(texts) if t is text), ranges[side])
    return texts


def _calls_of(each: _Fitted, message: int) -> tuple[int, int] | None:
    said = ((a, b) for a, b, s in each.said if s.message == message and s.kind == "calls")
    return next(said, None)


def _shared(
    calls: Sequence[Any], fitted: Sequence[_Fitted], found: Sequence[Any]
) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges of both renderings that hold equal calls, or equal arguments of one."""
    turns = [each.rendered[slice(*own)] for each, own in zip(fitted, found, strict=True)]
    if turns[0] == turns[1]:
        yield [*found]
        return
    at = [0, 0]
    for call in calls:
        inner = call.get("function", call) if isinstance(call, dict) else {}
        given = inner.get("arguments") if isinstance(inner, dict) else None
        text = given if isinstance(given, str) else to_json(given)
        places = [turn.find(text, start) for turn, start in zip(turns, at, strict=True)]
        if given and min(places) >= 0:
            at = [place + len(text) for place in places]
            yield [
                (own[0] + p, own[0] + p + len(text)) for own, p in zip(found, places, strict=True)
            ]


def _renumber(each: _Fitted, texts: Sequence[Text]) -> None:
    """Name texts by their place among more of them."""
    number = {(t.message, t.field): n for n, t in enumerate(texts) if t.field != CALLS}
    names = [(text.message, text.field) for text in each.texts]
    each.pieces = [p if p.text < 0 else p._replace(text=number[names[p.text]]) for p in each.pieces]


def _cut_out(each: _Fitted, number: int, place: tuple[int, int]) -> None:
    """Make a range of the rendering, which lies in one own text, a text's."""
    at, pieces = 0, list[_Piece]()
    for piece in each.pieces:
        size = len(piece.own) if piece.text < 0 else piece.stop - piece.start
        if piece.text < 0 and at <= place[0] and place[1] <= at + size:
            start, stop = place[0] - at, place[1] - at
            text = _Piece("", number, 0, stop - start)
            pieces += [_Piece(piece.own[:start]), text, _Piece(piece.own[stop:])]
        else:
            pieces.append(piece)
        at += size
    each.pieces = pieces


def _seen(
    each: _Fitted, texts: Sequence[Text], data: Sequence[bytes], starts: Sequence[int]
) -> list[Range]:
    """Return which bytes of the document a side renders of each text."""
    found = [Range(0, 0)] * len(texts)
    for piece in each.pieces:
        if piece.text >= 0:
            found[piece.text] = _in_document(piece, texts, data, starts)
    return found


def _in_document(
    piece: _Piece, texts: Sequence[Text], data: Sequence[bytes], starts: Sequence[int]
) -> Range:
    text, first = texts[piece.text].text, starts[piece.text]
    if (piece.start, piece.stop) == (0, len(text)):
        return Range(first, first + len(data[piece.text]))
    before, held = (
        len(text[s].encode()) for s in (slice(piece.start), slice(piece.start, piece.stop))
    )
    return Range(first + before, first + before + held)


class _Turns(NamedTuple):
    """What is learned of a chat.

    Attributes:
        messages: the numbers of messages that are.
        end: whether what ends a turn is.
        texts: all texts.
        starts: where each starts in the document, and where the last one ends.
        learned: the range of the document that is learned of each.
    """

    messages: set[int]
    end: bool
    texts: Sequence[Text]
    starts: Sequence[int]
    learned: Sequence[Range]

    def wants(self, said: Said) -> bool:
        """Return whether a part of a turn is learned."""
        if said.message not in self.messages:
            return False
        if said.kind == "end":
            return self.end
        if said.kind != REASONING_MARKS:
            return True
        return any(
            r.start < r.stop and (t.message, t.field) == (said.message, REASONING)
            for t, r in zip(self.texts, self.learned, strict=True)
        )


def _render(each: _Fitted, chat: Chat, ranges: Sequence[Range], turns: _Turns) -> Rendering:
    """Return a side's rendering in bytes, of which each text is a range of the document."""
    own, parts, places, closes, said = [b""], list[Range](), list[int](), list[int](), list[Range]()
    at = 0
    for piece in each.pieces:
        if piece.text < 0:
            data = piece.own.encode()
            own[-1] += data
            at += len(data)
            continue
        part, both = ranges[piece.text], turns.learned[piece.text]
        parts.append(part)
        places.append(at)
        closes.append(turns.starts[piece.text + 1])
        own.append(b"")
        if both.start < both.stop:
            said.append(Range(at + both.start - part.start, at + both.stop - part.start))
        at += part.stop - part.start
    text = each.rendered.encode()
    to_byte = _byte_places(each.rendered, len(text))
    turn_ends: dict[int, int] = {}
    for start, stop, of_turn in each.said:
        if of_turn.kind == "end" and _ends_before_another(chat, of_turn.message):
            turn_ends[of_turn.message] = to_byte(stop)
        if start < stop and turns.wants(of_turn):
            said.append(Range(to_byte(start), to_byte(stop)))
    return Rendering(
        text,
        tuple(own),
        np.array(parts, np.int64).reshape(-1, 2),
        np.array(places, np.int64),
        np.array(closes, np.int64),
        tuple(sorted(said)),
        turn_ends,
    )


def _ends_before_another(chat: Chat, number: int) -> bool:
    """Return whether a message is an assistant's, and what follows is nobody's answer to it."""
    later = chat.messages[number + 1]["role"] if number + 1 < len(chat.messages) else ""
    return chat.messages[number]["role"] == "assistant" and later in ("user", "system")


def _byte_places(text: str, num_bytes: int) -> Any:
    """Return what turns a place in characters into one in bytes."""
    if num_bytes == len(text):
        return int
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    bounds = np.append(0, np.cumsum(sizes, dtype=np.int64))
    return lambda place: int(bounds[place])


def _describe(chat: Chat, texts: Sequence[Text], data: Sequence[bytes]) -> bytes:
    """Return the messages without their texts, which the document holds."""
    messages = [
        {name: value for name, value in message.items() if name not in _TEXT_FIELDS}
        for message in chat.messages
    ]
    held = [[text.message, text.field, len(own)] for text, own in zip(texts, data, strict=True)]
    return orjson.dumps({"messages": messages, "tools": chat.tools, "texts": held})


def restore_chat(messages: bytes, text: bytes) -> Chat:
    """Return the chat that a document was made of, by what `RenderedChat.messages` says of it."""
    body = orjson.loads(messages)
    at = 0
    for number, field, size in body["texts"]:
        if field != CALLS:
            body["messages"][number][field] = text[at : at + size].decode()
        at += size
    return Chat(tuple(body["messages"]), tuple(body["tools"]))
