"""Where a template puts a chat's texts, and what else of its rendering an assistant says.

A chat is rendered with a unique character for each text. Between them is the template's *own text*;
chats of one structure share it. An assistant's turn begins after the text of
`add_generation_prompt`, and ends as at a chat's end.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from pipeline.chats.habits import (
    FIRST_MARK,
    LAST_MARK,
    MARK,
    Speaker,
    common_beginnings,
    habits_of,
    length_of,
    text_behind,
)
from pipeline.chats.messages import CALLS, CONTENT, REASONING, Chat, ChatError, Text, decode_chat

Kind = Literal["reasoning", "content", "calls", "end"]
"""The use of own text: marks of reasoning, before a content, calls of tools, the end of a turn."""


class Said(NamedTuple):
    """A range, in bytes, of an own text that belongs to a message.

    `hands_over`: it ends an assistant's message before one that doesn't answer it.
    """

    own: int
    start: int
    stop: int
    message: int
    kind: Kind
    hands_over: bool = False


@dataclass(frozen=True)
class Shape:
    """A template's rendering of chats with one structure.

    Attributes:
        own: its own texts, around the chat's.
        texts: the chat's, by number.
        said: parts of own texts that belong to a turn.
    """

    own: tuple[bytes, ...]
    texts: tuple[int, ...]
    said: tuple[Said, ...]


def mark_texts(chat: Chat, texts: Sequence[Text]) -> tuple[bytes, ...]:
    """Return a chat, as JSON, with marks instead of its texts.

    The last marks no blank text, which a template may treat as none; the first does, calls aside.
    """
    if len(texts) > LAST_MARK - FIRST_MARK:
        raise ChatError(f"{len(texts)} texts are too many for one chat")
    forms = []
    for with_blank in (True, False):
        messages = [dict(message) for message in chat.messages]
        for number, text in enumerate(texts):
            is_plain = text.field == CONTENT and CALLS not in messages[text.message]
            if text.text.strip() or (with_blank and is_plain):
                messages[text.message][text.field] = chr(FIRST_MARK + number)
        forms.append(Chat(messages, chat.tools).encode())
    return (*dict.fromkeys(forms),)


@lru_cache(maxsize=1024)
def find_shape(speaker: Speaker, marked: bytes) -> Shape:
    """Render a chat's structure, given by `mark_texts`.

    ChatError names a text that is dropped (but for reasoning), repeated or moved, or dropped calls.
    """
    chat = decode_chat(marked)
    rendered = speaker.template.render(chat.messages, chat.tools)
    texts = [*chat.texts()]
    places = _places(rendered, texts)
    own = tuple(MARK.split(rendered))
    said = _Turns(speaker, chat, rendered, places).find()
    bounds = sorted(places.values())
    return Shape(
        tuple(text.encode() for text in own),
        tuple(places),
        tuple(_in_own(each, bounds, own) for each in said),
    )


def ends_answers(speaker: Speaker) -> bool:
    """Whether a template ends a chat's only answer, which teaches a model to stop."""
    texts = ({"role": "user", CONTENT: "?"}, {"role": "assistant", CONTENT: "!"})
    chat = Chat(texts, ())
    said = find_shape(speaker, mark_texts(chat, [*chat.texts()])[0]).said
    return any(each.kind == "end" and each.message and each.start < each.stop for each in said)


def _places(rendered: str, texts: Sequence[Text]) -> dict[int, int]:
    """Return texts' places in the rendering by number, ascending."""
    places: dict[int, int] = {}
    last = -1
    for match in MARK.finditer(rendered):
        number = ord(match[0]) - FIRST_MARK
        if number >= len(texts):
            raise ChatError("its tools hold a character that is kept for marks")
        what = f"{texts[number].field} of message {texts[number].message}"
        if number in places:
            raise ChatError(f"the chat template renders the {what} twice")
        if number < last:
            before = f"{texts[last].field} of message {texts[last].message}"
            raise ChatError(f"the chat template moves the {what} behind the {before}")
        places[number] = match.start()
        last = number
    for number, text in enumerate(texts):
        if number not in places and text.field == CONTENT and MARK.match(text.text):
            raise _drops(CONTENT, text.message)
    return places


def _in_own(said: Said, bounds: Sequence[int], own: Sequence[str]) -> Said:
    """Convert characters of the whole rendering to bytes of their own text."""
    number = bisect_left(bounds, said.start)
    first = bounds[number - 1] + 1 if number else 0
    start, stop = (len(own[number][: at - first].encode()) for at in (said.start, said.stop))
    return said._replace(own=number, start=start, stop=stop)


class _Turns:
    def __init__(
        self, speaker: Speaker, chat: Chat, rendered: str, places: Mapping[int, int]
    ) -> None:
        self._speaker, self._chat, self._rendered = speaker, chat, rendered
        self._habits = habits_of(speaker)
        self._places: list[dict[str, int]] = [{} for _ in chat.messages]
        for number, text in enumerate(chat.texts()):
            if number in places:
                self._places[text.message][text.field] = places[number]
        until = [len(rendered.removesuffix(self._habits.always))]
        for marks in reversed(self._places):
            until.append(min(marks.values(), default=until[-1]))
        self._next_mark = until[-2::-1]
        ends = (max(marks.values(), default=-1) + 1 for marks in self._places)
        self._mark_end = [0, *accumulate(ends, max)]
        roles = [message["role"] for message in chat.messages]
        self._last_user, self._last_answer = (  # before each
            [*accumulate((n if r == role else -1 for n, r in enumerate(roles)), max, initial=-1)]
            for role in ("user", "assistant")
        )

    def find(self) -> list[Said]:
        found: list[Said] = []
        at = 0  # text before it belongs to earlier messages
        for number, message in enumerate(self._chat.messages):
            marks = [*self._places[number].values()]
            if message["role"] == "assistant":
                own = self._assistant(number, at)
                found += own
                at = max([at, *(place + 1 for place in marks), *(said.stop for said in own)])
                continue
            at = max([at, *(place + 1 for place in marks)])
            end = self._habits.user_end
            if marks and end and message["role"] == "user" and self._rendered.startswith(end, at):
                found.append(Said(0, at, at + len(end), number, "end"))
        return found

    def _assistant(self, number: int, at: int) -> list[Said]:
        marks = self._places[number]
        first = min(marks.values(), default=self._next_mark[number])
        start = self._start(number, at, first, has_text=bool(marks))
        calls = self._chat.messages[number].get(CALLS)
        if start is None:
            if calls:
                raise self._unfound(number, at)
            return []
        last = max(marks.values(), default=start - 1) + 1
        end, stop = self._end(number, last)
        while stop > end and self._rendered[stop - 1] == " ":  # the next turn's token may have it
            stop -= 1
        # DeepSeek R1's distilled models write a blank content behind calls, in a turn of its own.
        turn, header = self._rendered[last:stop], self._habits.header.rstrip()
        bare = turn.removesuffix(self._habits.end).rstrip()
        if calls and header and bare.endswith(header) and turn.endswith(self._habits.end):
            stop = last + len(bare) - len(header)
            end = stop - self._closing(self._rendered[last:stop])
        if calls and (start == end or not _shows(self._rendered[start:end], calls)):
            raise self._unfound(number, at)
        found = []
        if marks and start < first:
            found.append(Said(0, start, first, number, _kind(next(iter(marks)))))
        if len(marks) == 2:
            # Some templates write calls before a content, and nothing after it.
            kind: Kind = "calls" if calls and last == end else "reasoning"
            found.append(Said(0, first + 1, marks[CONTENT], number, kind))
        if calls:
            found += (Said(0, *part, number, "calls") for part in self._in_turns(last, end))
        elif last < end:
            found.append(Said(0, last, end, number, "reasoning"))
        return [*found, Said(0, end, stop, number, "end", self._hands_over(number))]

    def _in_turns(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield a range without ends of turns that headers follow, as before Nemotron's calls."""
        habits = self._habits
        between = habits.end + habits.header if habits.end and habits.header else ""
        calls = self._rendered[start:stop]
        for part in calls.split(between) if between else [calls]:
            if part:
                yield start, start + len(part)
            start += len(part) + len(between)

    def _unfound(self, number: int, at: int) -> ChatError:
        turn = self._rendered[at : self._next_mark[number]]
        if _shows(turn, self._chat.messages[number][CALLS]):
            return ChatError(
                f"the chat template drops some of the tool_calls of message {number}, or writes "
                "them where they can't be told from what is around"
            )
        return _drops(CALLS, number)

    def _hands_over(self, number: int) -> bool:
        later = self._chat.messages[number + 1 : number + 2]
        return any(message["role"] in ("user", "system") for message in later)

    def _start(self, number: int, at: int, first: int, *, has_text: bool) -> int | None:
        """Return a turn's start, after the header; None if it is invisible."""
        rendered, habits = self._rendered, self._habits
        find = rendered.rfind if has_text else rendered.find
        place = find(habits.header, at, first) if habits.header else -1
        start = habits.after_header(rendered, place) if place >= 0 else None
        if start is None:
            start = self._after_asking(number, at, first)
            start = start if start != at or has_text else None
        if start is None:
            return first if has_text else None
        empty = length_of(habits.no_reasoning, rendered[start:first])
        return start + empty if empty else habits.after_prompt(rendered, start, first)

    def _after_asking(self, number: int, at: int, first: int) -> int | None:
        """Return the end of what asks for a turn without a header.

        After a call's result it may name the call. If others have a header, None unless the text
        that asks is all there, or calls follow; white space after it is the template's.
        """
        usual = self._habits.asking
        asked = number > 0 and self._chat.messages[number - 1]["role"] == "user"
        if asked and usual and self._rendered.startswith(usual, at):
            return at + len(usual)
        begin, asking, whole = self._mark_end[number], "", False
        for earlier in self._before(number):
            asking = self._asking(earlier)
            whole = bool(asking) and self._rendered.startswith(asking, begin, first)
            if whole:
                break
        start = max(at, begin + self._shared(self._rendered[begin:first], asking))
        if not self._habits.header:
            return start
        behind = self._rendered[start:first]
        whole = whole or CALLS in self._chat.messages[number]
        return start + len(behind) - len(behind.lstrip()) if whole else None

    def _asking(self, earlier: Sequence[Mapping[str, Any]]) -> str:
        return text_behind(self._speaker.template, earlier, self._chat.tools, prompt=True)

    def _before(self, number: int) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield the nearest messages before one, as all take long to render, then all."""
        messages, user = self._chat.messages, self._last_user[number]
        system = [m for m in messages[:1] if m["role"] == "system"]
        since = max(user + 1, self._last_answer[number])
        near = [*system, messages[user], *messages[since:number]]
        if user >= 0 and len(near) < number:
            yield near
        yield messages[:number]

    def _end(self, number: int, last: int) -> tuple[int, int]:
        rendered, usual = self._rendered, self._habits.end
        is_last = number == len(self._chat.messages) - 1
        calls, until = self._chat.messages[number].get(CALLS), self._next_mark[number]
        if calls:
            whole = until if is_last else last + self._length_of_calls(number, last, until)
            length = self._closing(rendered[last:whole])
            if length or is_last:
                return whole - length, whole
            return whole, whole + self._control_at(whole)
        if REASONING in self._places[number] and CONTENT not in self._places[number] and usual:
            last = max(last, rendered.find(usual, last, until))
        if is_last:
            return last, until
        if usual and rendered.startswith(usual, last):
            return last, last + len(usual)
        length = self._control_at(last)
        shared = len(commonprefix([usual, rendered[last:until]]))
        while length and length < shared and rendered[last + length].isspace():
            length += 1
        return last, last + length

    def _length_of_calls(self, number: int, last: int, until: int) -> int:
        """Return the length of text after `last` until the calls stop."""
        behind, habits = self._rendered[last:until], self._habits
        tail = ""
        for earlier in self._before(number):
            tail = self._calls_alone(number, earlier)
            if tail and behind.lstrip().startswith(tail.lstrip()):
                return len(behind) - len(behind.lstrip()) + len(tail.lstrip())
        place = behind.find(habits.end) if habits.end else -1
        if place >= 0:
            return place + len(habits.end)
        shared = self._shared(behind, tail)  # this turn and the next may begin alike
        rest = tail[self._shared(tail, behind) :].lstrip()
        if not rest or rest.startswith(self._speaker.controls):
            return shared
        # Apriel writes calls of the last turn otherwise: see where another turn's text begins.
        is_user = self._chat.messages[number + 1]["role"] == "user"
        other = {"role": "tool" if is_user else "user", CONTENT: chr(LAST_MARK)}
        tails = (self._calls_alone(number, earlier, other) for earlier in self._before(number))
        lengths = (self._shared(behind, tail) for tail in tails)
        return next((length for length in lengths if length >= shared), 0)

    def _shared(self, one: str, other: str) -> int:
        """Return the length of a text's beginning that another has, without half a control string.

        White space may differ within.
        """
        own, others = common_beginnings(one, other)
        most = min(len(own), len(others))
        halves = (
            size
            for name in self._speaker.controls
            for size in range(1, min(len(name), most + 1))
            if one.startswith(name, len(own) - size) or other.startswith(name, len(others) - size)
        )
        return len(own) - max(halves, default=0)

    def _calls_alone(
        self, number: int, earlier: Sequence[Mapping[str, Any]], *later: Mapping[str, Any]
    ) -> str:
        """Return what follows a message's texts, or its header, if only `later` follows it."""
        habits, message, alone = self._habits, dict(self._chat.messages[number]), ""
        if REASONING not in self._places[number]:  # it may be dropped only before a later turn
            message.pop(REASONING, None)
        with suppress(ChatError):
            alone = self._speaker.template.render([*earlier, message, *later], self._chat.tools)
        tail = ["", *MARK.split(alone.removesuffix(habits.always))][-1 - len(later)]
        if self._places[number]:
            return tail
        # The calls come after the header and the mark of no reasoning.
        place = self._shared(tail, self._asking(earlier))
        near = max(0, place - len(habits.last_header + habits.prompt))
        if habits.header and habits.header in tail[near:]:  # of the prompt all, its end or nothing
            place = habits.after_header(tail, tail.find(habits.header, near))
            place = habits.after_prompt(tail, place, len(tail))
        tail = tail[place:]
        return tail[length_of(habits.no_reasoning, tail) :]

    def _closing(self, turn: str) -> int:
        if self._habits.end and turn.endswith(self._habits.end):
            return len(self._habits.end)
        bare = turn.rstrip()
        ends = [name for name in self._speaker.controls if bare.endswith(name)]
        return len(turn) - len(bare) + max(map(len, ends)) if ends else 0

    def _control_at(self, place: int) -> int:
        """Return the length of a control string at a place, white space included."""
        behind = self._rendered[place:]
        blank = len(behind) - len(behind.lstrip())
        names = [n for n in self._speaker.controls if behind.startswith(n, blank)]
        if any(self._habits.header.lstrip().startswith(name) for name in names):
            return 0  # it begins the next turn
        return blank + max(map(len, names)) if names else 0


def _shows(turn: str, calls: Sequence[Any]) -> bool:
    """Whether a turn has all calls' names, or their ids, which some templates write alone."""
    held = [call for call in calls if isinstance(call, dict)]
    inner = [call.get("function") or call for call in held]
    names = [str(each.get("name", "")) for each in inner if isinstance(each, dict)]
    ids = [str(call.get("id") or "") for call in held]
    return any(
        all(turn.count(name) >= every.count(name) for name in every)
        for every in (names, ids if all(ids) else names)
    )


def _drops(field: str, message: int) -> ChatError:
    return ChatError(f"the chat template drops the {field} of message {message}")


def _kind(field: str) -> Kind:
    return "reasoning" if field == REASONING else "content"
