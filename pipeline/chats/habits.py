"""What small chats show of a template: the forms that it takes, and its text around turns."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from os.path import commonprefix
from typing import Any

from pipeline.chats.messages import CALLS, CONTENT, REASONING, ChatError
from pipeline.chats.templates import ChatTemplate

FIRST_MARK, LAST_MARK = 0xF0000, 0xFFFFD  # a plane for private use
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")
_CLOSES = re.compile(r"\s*(</[^<>]+>)\s*")
_USER, _SAID = chr(FIRST_MARK), chr(FIRST_MARK + 1)
_CALL: dict[str, Any] = {
    "type": "function",
    "id": "call00000",
    "function": {"name": "look", "arguments": {}},
}


@dataclass(frozen=True)
class Speaker:
    """A side's template, and its tokenizer's control strings."""

    template: ChatTemplate
    controls: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.template)  # there may be hundreds of control tokens


@dataclass(frozen=True)
class Habits:
    """A template's text around turns, as small chats show it.

    Attributes:
        header: begins every assistant's turn.
        last_header: begins the last one, by the header and what is put before its reasoning.
        prompt: a generation prompt's text after that.
        asking: a user's end and the generation prompt, without a header.
        end: ends an assistant's turn.
        always: follows the last turn, whoever's, such as a prompt that isn't asked for.
        user_end: ends a user's.
        no_reasoning: marks empty reasoning, without white space.
    """

    header: str
    last_header: str
    prompt: str
    asking: str
    end: str
    always: str
    user_end: str
    no_reasoning: str

    def after_header(self, text: str, place: int) -> int:
        """Return the end of the header at a place."""
        whole = text.startswith(self.last_header, place)
        return place + len(self.last_header if whole else self.header)

    def after_prompt(self, text: str, start: int, stop: int) -> int:
        """Return the end of the prompt at a place, or of its last part alone, as of thoughts.

        Without one, of what closes thoughts that weren't opened.
        """
        parts = (self.prompt[cut:] for cut in range(len(self.prompt)))
        found = (part for part in parts if text.startswith(part, start, stop))
        part = next((part for part in found if part == self.prompt or part.strip()), "")
        closes = None if part else _CLOSES.match(text, start, stop)
        return closes.end() if closes and closes[1] not in self.end else start + len(part)


def settle_speaker(
    template: ChatTemplate, controls: Sequence[str], *, side: str, remedy: str = ""
) -> Speaker:
    """Return a side's template with the forms of tools, content and calls that it takes.

    ChatError, with `remedy` or an option of align, if it shows contents neither as strings nor as
    text parts.
    """
    reasons = []
    for tools_list, parts in product((False, True), repeat=2):
        form = replace(template, parts=parts, tools_list=tools_list)
        speaker = Speaker(form, tuple(controls))
        try:
            habits_of(speaker)
            return replace(speaker, template=_with_calls(speaker.template))
        except ChatError as error:
            reasons.append(str(error))
    why, in_parts = reasons[:2]
    # One that refuses both forms says itself what it needs.
    needs_images = any("refuses it" not in reason for reason in (why, in_parts))
    if in_parts != why:
        why += f" ({in_parts} if contents are lists of parts)"
    raise ChatError(
        f"the {side}'s chat template doesn't show the texts of a user and an assistant: "
        f"{why}: "
        + "a template that needs images can't be used; " * needs_images
        + (remedy or f"give another one, --chat-template {side}=FILE")
    )


def _with_calls(template: ChatTemplate) -> ChatTemplate:
    """Choose the form of calls that a template shows, else one that it takes."""
    name, arguments = _CALL["function"]["name"], {"city": "Bonn"}
    call = {**_CALL, "function": {"name": name, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", CONTENT: "?"},
        {"role": "assistant", CALLS: [call]},
    ]
    taken = []
    for null_content, json_arguments in product((False, True), repeat=2):
        settled = replace(template, null_content=null_content, json_arguments=json_arguments)
        with suppress(ChatError):
            rendered = settled.render(messages)
            if str(arguments) in rendered:  # Python's form: it expects JSON
                continue
            if name in rendered:
                return settled
            taken.append(settled)
    return taken[0] if taken else template


@lru_cache(maxsize=64)
def habits_of(speaker: Speaker) -> Habits:
    """Find a template's text around turns; ChatError if it doesn't show two small texts."""
    template = speaker.template
    user = {"role": "user", CONTENT: _USER}
    both = template.render([user, {"role": "assistant", CONTENT: _SAID}])
    if MARK.findall(both) != [_USER, _SAID]:
        raise ChatError("it shows " + ("one of them twice" if _USER in both else "none of them"))
    _, between, end = MARK.split(both)
    prompted = text_behind(template, [user], prompt=True)
    unprompted = text_behind(template, [user])
    earlier, turn_end = _earlier(template, between, end)
    chat = both.removeprefix(template.names.get("bos_token", ""))
    always = _begun(end, turn_end, chat)
    # What a prompt replaces is an answer's end, such as an end of text behind the last turn.
    always = always if unprompted.endswith(always) and always in prompted else ""
    end = end.removesuffix(always)
    user_end = commonprefix([unprompted, prompted]).removesuffix(always)
    if not user_end and not end:
        user_end = end = _end_before_others(speaker.controls, between, turn_end, chat)
    shared, asked = map(_whole_tags, common_beginnings(between, prompted))
    of_user = len(commonprefix([user_end, shared]))
    last_header = shared[of_user:]
    header = _whole_tags(commonprefix([last_header, earlier[of_user:]]))
    thinking = {"role": "assistant", REASONING: _SAID, CONTENT: chr(FIRST_MARK + 2)}
    no_reasoning = ""
    with suppress(ChatError):
        parts = MARK.split(template.render([user, thinking]))
        if len(parts) == 4:  # white space aside
            no_reasoning = "".join((parts[1][len(shared) :] + parts[2]).split())
    rest = prompted[len(asked) :]
    return Habits(header, last_header, rest, prompted, end, always, user_end, no_reasoning)


def _whole_tags(text: str) -> str:
    """Leave out half a tag at a text's end: `<think>` and `</think>` begin alike."""
    return re.sub(r"<[^<>]*$", "", text)


def common_beginnings(one: str, other: str) -> tuple[str, str]:
    """Return two texts' common beginning as each has it, with white space of its own within."""
    at = to = len(commonprefix([one, other]))
    while one[at : at + 1].isspace() or other[to : to + 1].isspace():
        behind, before = one[at:].lstrip(), other[to:].lstrip()
        alike = len(commonprefix([behind, before]))
        if not alike:
            break
        at, to = len(one) - len(behind) + alike, len(other) - len(before) + alike
    return one[:at], other[:to]


def _earlier(template: ChatTemplate, last: str, end: str) -> tuple[str, str]:
    """Return the texts around an assistant's that isn't the last; else those given."""
    marks = [chr(FIRST_MARK + number) for number in range(4)]
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": r, CONTENT: mark} for r, mark in zip(roles, marks, strict=True)]
    try:
        rendered = template.render(messages)
    except ChatError:
        return last, end
    found = MARK.split(rendered)
    return (found[1], found[2]) if MARK.findall(rendered) == marks else (last, end)


def _begun(behind: str, before_user: str, chat: str) -> str:
    """Return another turn's beginning, behind a last answer: as before a user's, or the chat's."""
    end = commonprefix([behind, before_user])
    sizes = range(len(end), 0, -1)
    shared = next((size for size in sizes if chat.startswith(end[-size:])), 0)
    begun = behind[len(end) - shared :] if len(end) < len(behind) else ""
    return begun if begun.strip() else ""


def _end_before_others(
    controls: Sequence[str], before_answer: str, before_user: str, chat: str
) -> str:
    """Return a turn's end that only other turns bring, as in vLLM's ChatML; else "".

    It is a control string before both roles' turns, and before that with which they begin.
    """
    shared = commonprefix([before_answer, before_user])
    bare = shared.lstrip()
    name = max((each for each in controls if bare.startswith(each)), key=len, default="")
    behind = before_answer.lstrip()[len(name) :].lstrip()
    if not name or chat.startswith(name) or not behind.startswith(tuple(controls)):
        return ""
    return before_answer.removesuffix(behind)


def text_behind(
    template: ChatTemplate,
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    *,
    prompt: bool = False,
) -> str:
    """Return the text after a chat's last text; "" if it is refused."""
    try:
        rendered = template.render(messages, tools, add_generation_prompt=prompt)
    except ChatError:
        return ""
    return MARK.split(rendered)[-1] if MARK.search(rendered) else ""


def length_of(dense: str, text: str) -> int:
    """Return the length of a text's start that spells `dense`, white space aside, or 0."""
    at = 0
    for character in dense:
        at += len(text[at:]) - len(text[at:].lstrip())
        if not text.startswith(character, at):
            return 0
        at += 1
    return at and at + len(text[at:]) - len(text[at:].lstrip())
