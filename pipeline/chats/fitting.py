"""Prove that a template's own texts and a chat's texts, joined, make up a rendering.

Calls of tools, which no message holds as a text, become texts as far as both sides write them
alike.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipeline.chats.habits import Speaker
from pipeline.chats.messages import CALLS, Chat, ChatError, Text
from pipeline.chats.templates import to_json
from pipeline.chats.turns import Said, Shape, find_shape

Held = tuple[int, int, int]
"""Part of a text that a rendering holds: the text's number, and the range of its bytes."""


@dataclass
class Fitted:
    """A rendering of which every byte is a text's, or the template's own.

    Attributes:
        own: the template's texts, around the parts of texts.
        held: these parts, ascending.
        said: ranges of the rendering that belong to turns.
    """

    rendered: bytes
    own: list[bytes]
    held: list[Held]
    said: list[tuple[int, int, Said]]


@dataclass(frozen=True)
class Texts:
    """A document's texts, in order, and their bytes."""

    texts: Sequence[Text]
    data: Sequence[bytes]


def fit_chat(speaker: Speaker, chat: Chat, texts: Texts, marked: Sequence[bytes]) -> Fitted:
    """Find each text in a rendering, `marked` by `mark_texts`; ChatError if one is missing."""
    rendered = speaker.template.render(chat.messages, chat.tools).encode()
    results = {n for n, message in enumerate(chat.messages) if message["role"] == "tool"}
    for form in marked[:-1]:
        with suppress(ChatError):
            return _fit(find_shape(speaker, form), rendered, texts, results)
    return _fit(find_shape(speaker, marked[-1]), rendered, texts, results)


def _fit(shape: Shape, rendered: bytes, texts: Texts, results: Container[int]) -> Fitted:
    whole = [texts.data[number] for number in shape.texts]
    written: dict[int, bytes] = {}  # by place, texts that the template has in another form
    if b"".join(chain(*zip(shape.own, whole, strict=False), shape.own[-1:])) == rendered:
        held = [(n, 0, len(data)) for n, data in zip(shape.texts, whole, strict=True)]
    else:
        held, written = _find_parts(rendered, shape, texts, results)
    firsts, at = [0], 0
    for place, (own, (_, start, stop)) in enumerate(zip(shape.own, held, strict=False)):
        at += len(own) + stop - start + len(written.get(place, b""))
        firsts.append(at)
    said = [(firsts[s.own] + s.start, firsts[s.own] + s.stop, s) for s in shape.said]
    around = [*shape.own]
    for place in reversed(range(len(held))):
        if held[place][1] == held[place][2]:  # nothing of it is shown as it is
            shown = around[place] + written.get(place, b"") + around[place + 1]
            around[place : place + 2] = [shown]
            del held[place]
    return Fitted(rendered, around, held, said)


def _find_parts(
    rendered: bytes, shape: Shape, texts: Texts, results: Container[int]
) -> tuple[list[Held], dict[int, bytes]]:
    """Return each text's part in a rendering; white space at its ends may be missing.

    What tools return, in messages `results`, may be there as JSON (Llama 3.1, gpt-oss): such forms
    are returned by place, and none of the text is held.
    """
    held: list[Held] = []
    written: dict[int, bytes] = {}
    at = len(shape.own[0])
    if not rendered.startswith(shape.own[0]):
        raise _changed(texts.texts, shape, 0, "what it puts behind")
    for place, number in enumerate(shape.texts, 1):
        data, behind = texts.data[number], shape.own[place]
        forms = [
            form
            for form in _forms(texts.texts[number].text, len(data))
            if rendered.startswith(data[form[0] : form[1]], at)
        ]
        fitting = (f for f in forms if rendered.startswith(behind, at + f[1] - f[0]))
        found = next(fitting, None)
        if found is None:
            as_json = to_json(texts.texts[number].text)[1:-1].encode()
            is_result = texts.texts[number].message in results
            if not (is_result and rendered.startswith(as_json + behind, at)):
                raise _changed(texts.texts, shape, place, "what it puts behind" if forms else "")
            written[place - 1], found = as_json, (0, 0)
            at += len(as_json)
        held.append((number, *found))
        at += found[1] - found[0] + len(behind)
    if at != len(rendered):
        raise _changed(texts.texts, shape, len(shape.texts), "what it puts behind")
    return held, written


def _changed(texts: Sequence[Text], shape: Shape, place: int, what: str) -> ChatError:
    number = shape.texts[max(0, place - 1)]
    near, more = texts[number], ""
    if any("</think>" in text.text for text in texts[number : number + 2]):
        more = "; a text holds </think>: give what was thought as reasoning_content"
    told = f"{what} the {near.field} of message {near.message}".strip()
    return ChatError(
        "putting the texts back doesn't give what the chat template renders: "
        f"{told} changes with the texts{more}"
    )


def _forms(text: str, size: int) -> Iterator[tuple[int, int]]:
    """Yield a text's forms: whole, or without white space at its ends."""
    yield 0, size
    if text and (text[0].isspace() or text[-1].isspace()):
        for blank in (None, "\n"):
            start = size - len(text.lstrip(blank).encode())
            stop = max(start, len(text.rstrip(blank).encode()))
            yield start, stop
            yield 0, stop
            yield start, size


def share_calls(chat: Chat, texts: Texts, fitted: Sequence[Fitted]) -> Texts:
    """Add to the texts tool calls that both sides render alike, else equal arguments."""
    added: list[tuple[Text, bytes, list[tuple[int, int]]]] = []
    for number, message in enumerate(chat.messages):
        if CALLS not in message:
            continue
        found = [_calls_of(each, number) for each in fitted]
        if None in found:
            continue
        for ranges in _shared(message[CALLS], fitted, found):
            data = fitted[0].rendered[slice(*ranges[0])]
            if all(_is_in_order(f, r, texts, number) for f, r in zip(fitted, ranges, strict=True)):
                added.append((Text(number, CALLS, data.decode()), data, ranges))
    if not added:
        return texts
    every = [*enumerate(texts.texts), *((-1, text) for text, _, _ in added)]
    every.sort(key=lambda each: each[1].message)
    places = {old: new for new, (old, _) in enumerate(every) if old >= 0}
    of_calls = [new for new, (old, _) in enumerate(every) if old < 0]
    for side, each in enumerate(fitted):
        each.held = [(places[old], start, stop) for old, start, stop in each.held]
        for new, (_, _, ranges) in zip(of_calls, added, strict=True):
            _cut_out(each, new, ranges[side])
    bytes_of = iter([data for _, data, _ in added])
    return Texts(
        [text for _, text in every],
        [texts.data[old] if old >= 0 else next(bytes_of) for old, _ in every],
    )


def _calls_of(each: Fitted, message: int) -> tuple[int, int] | None:
    said = ((a, b) for a, b, s in each.said if s.message == message and s.kind == "calls")
    return next(said, None)


def _shared(
    calls: Sequence[Any], fitted: Sequence[Fitted], found: Sequence[Any]
) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges of both renderings with equal calls, or equal arguments of one."""
    turns = [each.rendered[slice(*own)] for each, own in zip(fitted, found, strict=True)]
    if turns[0] == turns[1]:
        yield [*found]
        return
    at = [0, 0]
    for call in calls:
        inner = call.get("function", call) if isinstance(call, dict) else {}
        given = inner.get("arguments") if isinstance(inner, dict) else None
        text = (given if isinstance(given, str) else to_json(given)).encode()
        places = [turn.find(text, start) for turn, start in zip(turns, at, strict=True)]
        if given and min(places) >= 0:
            at = [place + len(text) for place in places]
            yield [
                (own[0] + p, own[0] + p + len(text)) for own, p in zip(found, places, strict=True)
            ]


def _is_in_order(each: Fitted, place: tuple[int, int], texts: Texts, message: int) -> bool:
    """Whether a range is in one own text, after the texts of its message and earlier."""
    at = 0
    for number, own in enumerate(each.own):
        if at <= place[0] and place[1] <= at + len(own):
            before = texts.texts[each.held[number - 1][0]].message if number else -1
            if number == len(each.held):
                return before <= message
            return before <= message < texts.texts[each.held[number][0]].message
        at += len(own)
        if number < len(each.held):
            at += each.held[number][2] - each.held[number][1]
    return False


def _cut_out(each: Fitted, number: int, place: tuple[int, int]) -> None:
    """Turn a range of the rendering, within one own text, into a text's."""
    at = 0
    for n, own in enumerate(each.own):
        if at <= place[0] and place[1] <= at + len(own):
            start, stop = place[0] - at, place[1] - at
            each.own[n : n + 1] = [own[:start], own[stop:]]
            each.held.insert(n, (number, 0, stop - start))
            return
        at += len(own) + each.held[n][2] - each.held[n][1]
    raise AssertionError("a call lies across texts")
