"""A chat's two renderings: where its texts are, what is learned, and what is refused."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.chats.habits import settle_speaker
from pipeline.chats.messages import ChatError, read_chat
from pipeline.chats.rendering import Learn, LearnRule, RenderedChat, render_chat, restore_chat
from pipeline.chats.templates import ChatTemplate
from tests.support.chats import (
    CONTROLS,
    NAMES,
    STOCK,
    SYSTEM,
    THINKING,
    TOOLS,
    TWO_TURNS,
    WEATHER,
    said,
    speaker,
    template,
    user,
)

_CALLS = {"tool_calls": TOOLS[1]["tool_calls"]}
_LONG = [m for n in range(100) for m in (user(f"Question {n}?"), said(f"Answer {n}."))]
_CHATS: dict[str, list[dict[str, Any]]] = {
    "two turns": TWO_TURNS,
    "thinking": THINKING,
    "emoji and right to left": [user("😀 שלום 👩‍👩‍👧?"), said("مرحبا! 😀")],
    "repeated": [user("hi"), said("hi"), user("hi"), said("hi")],
    "an empty answer": [user("Say nothing."), said(""), user("Thanks"), said("!")],
    "200 messages": _LONG,
    "a message of 1 MB": [user("word " * 200_000), said("Long.")],
    "like a template": [user("[/INST] </s> <|im_end|>\n"), said("<|im_start|>assistant\n")],
}


def _render(messages: Any, *sides: str, tools: Any = None, **rule: Any) -> RenderedChat:
    student, teacher = (speaker(side) for side in (sides * 2)[:2])
    return render_chat(read_chat(messages, tools), (student, teacher), LearnRule(**rule))


def _said(chat: RenderedChat, side: int = 0) -> list[str]:
    text = chat.sides[side].text
    merged: list[list[int]] = []
    for start, stop in chat.sides[side].said:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(stop, merged[-1][1])
        else:
            merged.append([start, stop])
    return [text[start:stop].decode() for start, stop in merged]


def _put_together(chat: RenderedChat, side: int) -> bytes:
    own, at, parts = chat.sides[side], 0, list[bytes]()
    for size, start, stop in own.pieces:
        parts += own.own_text[at : at + size], chat.text[start:stop]
        at += size
    return b"".join(parts)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("kind", _CHATS)
def test_renderings_are_those_of_transformers_and_ranges_are_exact(name: str, kind: str) -> None:
    chat = _render(_CHATS[kind], name)
    (expected,), _ = render_jinja_template(
        [_CHATS[kind]], chat_template=template(name).text, **NAMES
    )
    side = chat.sides[0]
    same = side.text.decode() == expected  # a difference of 1 MB takes pytest minutes to show
    assert same
    assert _put_together(chat, 0) == side.text
    assert restore_chat(chat.messages, chat.text) == read_chat(_CHATS[kind])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n"]),
        ("llama2", [" It is 4. </s>", " 6, of course. </s>"]),
        ("llama3", ["It is 4.<|eot_id|>", "6, of course.<|eot_id|>"]),
        ("mistral", ["It is 4.</s>", "6, of course.</s>"]),
        ("gemma", ["It is 4.<end_of_turn>\n", "6, of course.<end_of_turn>\n"]),
        ("phi3", ["It is 4.<|end|>\n", "6, of course.<|end|>\n</s>"]),
        ("qwen2_5", ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n"]),
        # The empty thoughts of the last turn are the template's.
        ("qwen3", ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n"]),
    ],
)
def test_a_turn_is_learned_with_its_end(name: str, expected: list[str]) -> None:
    assert _said(_render(TWO_TURNS, name)) == expected


def test_whose_messages_are_learned_is_asked() -> None:
    assert _said(_render(TWO_TURNS, "chatml", learn="last")) == ["6, of course.<|im_end|>\n"]
    assert _said(_render(TWO_TURNS, "chatml", end=False)) == ["It is 4.", "6, of course."]
    everybody = _render(SYSTEM, "chatml", learn="all", end=False)
    assert _said(everybody) == [message["content"] for message in SYSTEM]


@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        ("assistant", ["It is 4.<|im_end|>\n"]),
        ("last", []),
        ("all", [f"{message['content']}<|im_end|>\n" for message in TWO_TURNS[:3]]),
    ],
)
def test_a_message_without_weight_is_not_learned(learn: Learn, expected: list[str]) -> None:
    """As OpenAI's fine-tuning has it."""
    weighed = [*({**message, "weight": 1} for message in TWO_TURNS[:3]), said("Six?", weight=0)]
    chat = _render(weighed, "chatml", learn=learn)
    assert _said(chat) == expected
    assert chat.text.endswith(b"Six?")


def test_reasoning_is_learned_with_its_marks_where_both_sides_show_it() -> None:
    learned = ["<think>\n17*3 is 51.\n</think>\n\n51.<|im_end|>\n"]
    assert _said(_render(THINKING, "qwen3")) == learned
    both = _render(THINKING, "qwen3", "chatml")
    assert _said(both) == ["51.<|im_end|>\n"]
    assert both.text == b"17*3?17*3 is 51.51."
    assert both.learned == ((16, 19),)


def test_reasoning_of_earlier_turns_that_a_template_drops_is_not_learned() -> None:
    chat = _render([*THINKING, user("Sure?"), said("Yes.", reasoning_content="Yes.")], "qwen3")
    assert _said(chat) == ["51.<|im_end|>\n", "<think>\nYes.\n</think>\n\nYes.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("sides", "side"), [(("qwen3", "chatml"), "teacher"), (("chatml", "qwen3"), "student")]
)
def test_a_thought_alone_that_one_side_drops_is_refused(sides: tuple[str, str], side: str) -> None:
    """That side's tokens cover nothing: it ended the whole job."""
    with pytest.raises(ChatError, match=f"{side}: the chat template shows none of its texts"):
        _render([user(""), said("", reasoning_content="let me think")], *sides)


def test_a_call_that_both_sides_render_alike_is_text() -> None:
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
    )
    chat = _render(TOOLS, "qwen2_5", "qwen3", tools=[WEATHER])
    assert _said(chat) == [f"{call}<|im_end|>\n", "18 degrees.<|im_end|>\n"]
    assert call.encode() in chat.text
    assert len(chat.learned) == 2


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "Hm."}])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_a_call_may_have_no_content(name: str, content: dict[str, Any]) -> None:
    """`null` is what services that call tools give."""
    messages = [TOOLS[0], {"role": "assistant", **content, **_CALLS}, *TOOLS[2:]]
    chat = _render(messages, name, tools=[WEATHER])
    given = [messages[0], {"content": None, **messages[1]}, *messages[2:]]
    (expected,), _ = render_jinja_template(
        [given], tools=[WEATHER], chat_template=template(name).text, **NAMES
    )
    assert (chat.sides[0].text.decode(), _put_together(chat, 0)) == (expected, chat.sides[0].text)
    turn, answer = _said(chat)
    assert turn.startswith(content.get("content") or "<tool_call>")
    assert turn.endswith('"days": 2}}\n</tool_call><|im_end|>\n')
    assert answer == "18 degrees.<|im_end|>\n"
    # Llama 3's first template knows no calls: its student would learn to end the turn instead.
    with pytest.raises(ChatError, match=r"teacher: .*drops the tool_calls of message 1"):
        _render(messages, name, "llama3", tools=[WEATHER])


def test_a_template_that_shows_calls_for_null_gets_null() -> None:
    text = (
        "{% for m in messages %}<s>{% if m.tool_calls and m.content is none %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% else %}{{ m.content }}"
        "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], {"role": "assistant", "content": None, **_CALLS}, *TOOLS[2:]]
    assert _said(render_chat(read_chat(messages), (side, side), LearnRule()))[0] == "weather</s>"
    with pytest.raises(ChatError, match="drops the tool_calls of message 1"):
        render_chat(read_chat(TOOLS), (side, side), LearnRule())


@pytest.mark.parametrize("result", ['{"sky": "blau",\n "temp": 18}', "18 °C\n", '"', "\n", "18 C"])
@pytest.mark.parametrize("learn", ["assistant", "all"])
def test_a_result_that_a_template_writes_as_json_is_found(learn: Learn, result: str) -> None:
    """As Llama 3.1 and gpt-oss do: a result with a quote or a line end was refused."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'tool' %}{{ {'output': m.content} | tojson }}{% else %}{{ m.content }}"
        "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = read_chat([*TOOLS[:2], {**TOOLS[2], "content": result}, TOOLS[3]])
    rendered = render_chat(chat, (side, speaker("qwen3")), LearnRule(learn, end=False))
    assert [_put_together(rendered, n) == rendered.sides[n].text for n in (0, 1)] == [True, True]
    call = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}'
    results = ["18 C"] if result == "18 C" else []
    expected = [call, "18 degrees."]
    if learn == "all":
        expected = ["Weather in Bonn?", call, *results, "18 degrees."]
    assert _said(rendered) == expected
    assert restore_chat(rendered.messages, rendered.text) == chat


def test_only_a_result_may_be_written_as_json() -> None:
    side = settle_speaker(
        ChatTemplate(_ALL % "{{ m.content | tojson }}", NAMES), (), side="student"
    )
    with pytest.raises(ChatError, match="the content of message 0 changes"):
        render_chat(read_chat([user('"Hi"'), said("Hello")]), (side, side), LearnRule())


_WRITES_CALLS = (
    "{%% for m in messages %%}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{%% for c in m.tool_calls or [] %%}[%s]{%% endfor %%}<|end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>\n{%% else %%}{{ eos_token }}{%% endif %%}"
)


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize(
    ("written", "later"),
    [
        ("", user("Well?")),  # the student learned the turn's end, and half of what follows
        ("{{ '(called)' }}", user("Well?")),
        ("{{ c.function.name if loop.first }}", TOOLS[2]),  # of two only one, as gpt-oss's
    ],
)
def test_calls_that_a_template_drops_are_named(
    written: str, later: dict[str, Any], has_ids: bool
) -> None:
    side = settle_speaker(ChatTemplate(_WRITES_CALLS % written, NAMES), CONTROLS, side="student")
    calls = [{**call, "id": f"call{n}"} for n, call in enumerate(_CALLS["tool_calls"] * 2)]
    if not has_ids:
        calls = [{"function": call["function"]} for call in calls]
    messages = [TOOLS[0], {"role": "assistant", "tool_calls": calls}, later, TOOLS[3]]
    with pytest.raises(ChatError, match="drops the tool_calls of message 1"):
        render_chat(read_chat(messages), (side, side), LearnRule())


_CALLS_FIRST = (
    "{%% for m in messages %%}<|{{ m.role }}|>\n{%% for c in m.tool_calls or [] %%}"
    "[{{ c.function.name }}]%s{%% endfor %%}{{ m.content or '' }}<|end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>\n{%% endif %%}"
)


@pytest.mark.parametrize("later", [[], [user("Well?"), said("Warm.")], TOOLS[2:]])
def test_calls_before_a_content_are_learned(later: list[dict[str, Any]]) -> None:
    """As Gemma 4 and pythonic templates write them: they were refused as dropped."""
    side = settle_speaker(ChatTemplate(_CALLS_FIRST % "", NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], said("Wait.", **_CALLS), *later]
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert _said(chat)[0] == "[weather]Wait.<|end|>\n"


def test_calls_that_are_not_found_are_not_called_dropped() -> None:
    """DeepSeek R1's distilled models write them in a turn of their own."""
    text = _CALLS_FIRST % "<|end|>\n<|assistant|>\n"
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], said("Wait.", **_CALLS), *TOOLS[2:]]
    with pytest.raises(ChatError, match="some of the tool_calls of message 1, or writes them"):
        render_chat(read_chat(messages), (side, side), LearnRule())


def test_a_call_after_a_result_without_what_asks_for_it_is_learned() -> None:
    """As Apertus' and DeepSeek V3's second call: it was refused as dropped."""
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]{% else %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|{{ m.role }}|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|end|>{{ c.function.name }}{% endfor %}"
        "{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:3], *TOOLS[1:]]), (side, side), LearnRule())
    assert _said(chat) == ["<|end|>weather</s>", "<|end|>weather</s>", "18 degrees.</s>"]


@pytest.mark.parametrize("later", [[user("Well?")], [TOOLS[2]]])
@pytest.mark.parametrize("as_json", ["", " | tojson"])
def test_a_call_is_learned_as_json_and_to_the_end_of_its_turn(
    as_json: str, later: list[dict[str, Any]]
) -> None:
    """Not as Python writes a dict, and without what the next turn and the text's end begin with."""
    text = _WRITES_CALLS % f"{{{{ c.function.name }}}} {{{{ c.function.arguments{as_json} }}}}"
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:2], *later, TOOLS[3]]), (side, side), LearnRule())
    assert _said(chat)[0] == '[weather {"city": "Bonn", "days": 2}]<|end|>\n'


_LATE_THOUGHTS = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.asked %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As Qwen3.5's: a turn begins with `<think>`, but for earlier ones."""


@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "Look it up."}])
def test_a_call_of_an_earlier_turn_whose_thoughts_are_dropped_is_learned(
    thoughts: dict[str, str],
) -> None:
    side = settle_speaker(ChatTemplate(_LATE_THOUGHTS, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], {**TOOLS[1], **thoughts}, *TOOLS[2:], user("Thanks"), said("Bye.")]
    assert _said(render_chat(read_chat(messages), (side, side), LearnRule())) == [
        "<tool_call>weather</tool_call><|im_end|>\n",
        "18 degrees.<|im_end|>\n",
        "Bye.<|im_end|>\n",
    ]


@pytest.mark.parametrize("result", ["18 C", ""])
@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "Look it up."}])
def test_a_turn_that_goes_on_after_a_result_has_no_header(
    thoughts: dict[str, str], result: str
) -> None:
    """As Gemma 4's: a second call was refused, and its thoughts lost their opening mark."""
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]<result|>{% else %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "<turn>{{ m.role }}\n{% endif %}"
        "{% if m.reasoning_content %}<thought>{{ m.reasoning_content }}</thought>{% endif %}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
        "{% if not m.tool_calls %}{{ m.content }}</turn>\n{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<turn>assistant\n{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    asked = [{**TOOLS[1], **thoughts}, {**TOOLS[2], "content": result}]
    chat = render_chat(
        read_chat([TOOLS[0], *asked, *asked, {**TOOLS[3], **thoughts}]), (side, side), LearnRule()
    )
    thought = "<thought>Look it up.</thought>" if thoughts else ""
    call = '<call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}</call>'
    turns = [thought + call, thought + call, thought + "18 degrees.</turn>\n"]
    assert _said(chat) == turns


@pytest.mark.parametrize("result", ["18 C", ""])
@pytest.mark.parametrize("call_id", ["call00001", "another01"])
def test_what_follows_a_tools_result_is_not_the_answers(result: str, call_id: str) -> None:
    """Mistral's turns have no header, and its results end with the call's id: it was learned."""
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
        "{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
        '{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [*TOOLS[:2], {**TOOLS[2], "content": result, "tool_call_id": call_id}, TOOLS[3]]
    call = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]</s>'
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert _said(chat) == [call, " 18 degrees.</s>"]


def test_an_earlier_empty_answer_ends_as_others() -> None:
    side = settle_speaker(ChatTemplate(_LATE_THOUGHTS, NAMES), CONTROLS, side="student")
    messages = [user("Say nothing."), said(""), user("Thanks"), said("Bye.")]
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert _said(chat) == ["<|im_end|>\n", "Bye.<|im_end|>\n"]


@pytest.mark.parametrize("preamble", [False, True])
@pytest.mark.parametrize(
    ("header", "end"),
    [("<|%s|>", "<|end|>"), ("<|turn|>%s\n", "<|end|>\n"), ("### %s: ", "\n\n")],
)
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (TWO_TURNS, ["It is 4.", "6, of course."]),
        (TOOLS, ['weather {"city": "Bonn", "days": 2}', "18 degrees."]),
        (TOOLS[:2], ['weather {"city": "Bonn", "days": 2}']),
    ],
)
def test_a_generation_prompt_that_a_template_always_writes_is_not_learned(
    messages: list[dict[str, Any]], expected: list[str], header: str, end: str, preamble: bool
) -> None:
    """As Command R7B's for tools and Phi-4-mini's; what it begins with begins other turns, too."""
    text = (
        "{{ bos_token }}"
        + (f"{header % 'system'}Be kind.{end}" if preamble else "")
        + "{% for m in messages %}"
        + header % "{{ m.role }}"
        + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
        + "{{ c.function.arguments | tojson }}{% endfor %}"
        + f"{{{{ {end!r} }}}}{{% endfor %}}{{{{ {header % 'assistant'!r} }}}}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert _said(chat) == [answer + end for answer in expected]
    everything = render_chat(read_chat(messages), (side, side), LearnRule("all"))
    assert _said(everything)[0] == messages[0]["content"] + end


@pytest.mark.parametrize("header", ["<|im_start|>%s\n", ""])
def test_a_long_chat_of_calls_is_rendered_few_times(
    header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call, and every answer to a result, rendered all that was before it, twice."""
    text = (
        "{% for m in messages %}"
        + header.replace("%s", "{{ m.role }}")
        + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        + header.replace("%s", "assistant")
        + "{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], *TOOLS[1:3] * 200, TOOLS[3], user("Thanks"), said("Bye.")]
    chat, sizes = read_chat(messages), list[int]()
    render = ChatTemplate.render

    def count(self: ChatTemplate, given: Any, *rest: Any, **more: Any) -> str:
        sizes.append(len(given))
        return render(self, given, *rest, **more)

    monkeypatch.setattr(ChatTemplate, "render", count)
    rendered = render_chat(chat, (side, side), LearnRule())
    assert sum(sizes) < 20 * len(messages)
    call = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}<|im_end|>\n'
    assert _said(rendered) == [*[call] * 200, "18 degrees.<|im_end|>\n", "Bye.<|im_end|>\n"]


def test_a_call_that_begins_like_the_prompts_thoughts_is_learned() -> None:
    """As Gemma 4's: half of its prompt's mark was taken for the header, and the call as dropped."""
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}<response|>{% else %}"
        "<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        "<|call>{{ c.function | tojson }}<call|>{% endfor %}{{ m.content }}"
        "{{ '<|response>' if m.tool_calls else '<turn|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn>assistant\n<|thought>\n<thought|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    call = '<|call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}<call|><|response>'
    chat = render_chat(read_chat([*TOOLS[:3], *TOOLS[1:]]), (side, side), LearnRule())
    assert _said(chat) == [call, call, "18 degrees.<turn|>\n"]


_IN_LOOP = "{% for m in messages %}<|turn|>{{ m.role }}\n"
_TO_ALL = "<|turn|>system\nAnswer in JSON.<|end|>\n"


@pytest.mark.parametrize(
    "text",
    [
        # DeepSeek V3.2's thoughts, of which earlier turns have the end alone.
        _IN_LOOP + "{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n<think></think>{% endif %}",
        # Command R+'s instructions for tools, which follow every chat.
        _IN_LOOP
        + "{{ m.content }}<|end|>\n{% endfor %}"
        + _TO_ALL
        + "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
        # Llama 4's, whose prompt goes on where turns do.
        _IN_LOOP + "{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}" + _TO_ALL + "<|turn|>assistant\n{% endif %}",
    ],
    ids=["end of thoughts", "instructions", "instructions in the prompt"],
)
def test_what_a_prompt_ends_with_is_not_learned(text: str) -> None:
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(TWO_TURNS), (side, side), LearnRule())
    assert _said(chat) == ["It is 4.<|end|>\n", "6, of course.<|end|>\n"]
    assert _put_together(chat, 0) == chat.sides[0].text


@pytest.mark.parametrize("before", ["\n\n### Response:\n", "        <|assistant|>\n"])
def test_a_header_with_other_white_space_than_the_prompts_is_not_learned(before: str) -> None:
    """As in Alpaca's template and others' of vLLM, and in templates with indentation."""
    prompt = " ".join(before.split()) + "\n"
    text = (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{{{{ {before!r} }}}}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|end|>{{ c.function.name }}{% endfor %}"
        "</s>{% else %}<|user|>{{ m.content }}{% endif %}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TWO_TURNS, *TOOLS]), (side, side), LearnRule())
    turns = ["It is 4.</s>", "6, of course.</s>", "<|end|>weather</s>", "18 degrees.</s>"]
    assert _said(chat) == turns


def test_what_asks_for_a_call_may_have_other_white_space() -> None:
    """As in vLLM's template of DeepSeek V3.1, whose calls were learned with their header."""
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|></think>' if m.tool_calls else '   <|assistant|>  </think>' }}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|end|>{{ c.function.name }}{% endfor %}"
        "</s>{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' <|assistant|> </think>' }}{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(TOOLS), (side, side), LearnRule())
    assert [said.strip() for said in _said(chat)] == ["<|end|>weather</s>", "18 degrees.</s>"]


@pytest.mark.parametrize("later", [[TOOLS[2]], [user("Well?")]])
def test_what_begins_the_next_turn_ends_no_call(later: list[dict[str, Any]]) -> None:
    """As behind Command R+'s calls, which end by themselves: a header's first token was learned."""
    text = (
        "{% for m in messages %}<|im_start|><|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}\n{% else %}<|im_end|>{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:2], *later, TOOLS[3]]), (side, side), LearnRule())
    assert _said(chat) == ["weather\n", "18 degrees.<|im_end|>"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("later", [[TOOLS[2]], [user("Well?")]])
def test_calls_that_the_last_turn_has_otherwise_are_learned_whole(
    later: list[dict[str, Any]], count: int
) -> None:
    """As Apriel's, which have ids but in the last turn: half a call was learned, and no end."""
    text = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% set is_last = loop.last %}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ ',' + c.id if not is_last }}]"
        "{% endfor %}{{ '<|end|>\n' if m.role == 'assistant' and not loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    calls = said("", tool_calls=_CALLS["tool_calls"] * count)
    chat = render_chat(read_chat([TOOLS[0], calls, *later, TOOLS[3]]), (side, side), LearnRule())
    assert _said(chat) == ["[weather,call00001]" * count + "<|end|>\n", "18 degrees."]


@pytest.mark.parametrize("later", [[], TOOLS[2:], [user("Well?"), said("Warm.")]])
def test_a_blank_turn_behind_a_call_is_not_learned(later: list[dict[str, Any]]) -> None:
    """As DeepSeek R1's distilled models write a content of "": its header was learned."""
    text = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "<|assistant|>[{{ c.function.name }}]<|end|>\n{% endfor %}"
        "{% if m.content is not none %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:2], *later]), (side, side), LearnRule())
    assert _said(chat)[0] == "[weather]<|end|>\n"


_SPEAKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<|answer|>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("blank", ["", "  ", " \n"])
@pytest.mark.parametrize("last", [[], [said("Yes."), user("Sure?")]])
@pytest.mark.parametrize(
    ("text", "before"), [(template("chatml").text, ""), (_SPEAKS, "<|answer|>")]
)
def test_a_blank_answer_is_learned_to_its_line_end(
    blank: str, last: list[dict[str, Any]], text: str, before: str
) -> None:
    """The line end was lost; what stands before a content was taken for the next turn's."""
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [user("Say nothing."), said(blank), user("Really?"), *last, said(blank)]
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    silent = f"{before}{blank}<|im_end|>\n"
    assert _said(chat) == [silent, *([f"{before}Yes.<|im_end|>\n"] if last else []), silent]
    assert _put_together(chat, 0) == chat.sides[0].text


def test_of_calls_that_sides_write_otherwise_only_equal_arguments_are_text() -> None:
    other = ChatTemplate(
        "{% for m in messages %}<s>{{ m.role }}|{{ m.content }}{% for c in m.tool_calls or [] %}"
        "call {{ c.function.name }} with {{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% endfor %}{% if add_generation_prompt %}<s>assistant|{% endif %}",
        NAMES,
    )
    sides = speaker("qwen3"), settle_speaker(other, CONTROLS, side="teacher")
    chat = render_chat(read_chat(TOOLS, [WEATHER]), sides, LearnRule())
    arguments = b'{"city": "Bonn", "days": 2}'
    assert chat.text == b"Weather in Bonn?" + arguments + b"18 C18 degrees."
    assert _said(chat)[0].startswith('<tool_call>\n{"name": "weather"')  # learned all the same
    assert _said(chat, 1)[0] == "call weather with " + arguments.decode() + "</s>"
    assert all(_put_together(chat, side) == chat.sides[side].text for side in (0, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('no') }}", "doesn't show the texts.*TemplateError: no"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "it shows none of them"),
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "today=2026-01-31"),
        ("{% for m in messages %}{{ m.content[0].image }}{% endfor %}", "needs images"),
        ("{{ messages[0].content", "TemplateSyntaxError"),
        (
            "{% for m in messages %}{{ m.content + functions }}{% endfor %}",
            r"asks for functions \(vocag align --template-options functions=VALUE\): give another",
        ),
    ],
)
def test_a_template_that_shows_no_texts_is_refused(text: str, words: str) -> None:
    with pytest.raises(ChatError, match=words):
        settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")


@pytest.mark.parametrize("number", ["123456789012345678901234", "-18446744073709551617"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_number_that_json_readers_round_is_refused(number: str, as_text: bool) -> None:
    """Both sides rendered, and learned, another one."""
    arguments: Any = f'{{"wei": [{number}]}}'
    calls = [{"function": {"name": "send", "arguments": arguments}}]
    if not as_text:
        calls[0]["function"]["arguments"] = orjson.loads(arguments)
    with pytest.raises(ChatError, match="hold a number beyond 64 bits"):
        read_chat([user("Send it"), {"role": "assistant", "tool_calls": calls}])
    calls[0]["function"]["arguments"] = '{"wei": 18446744073709551615, "share": 0.5}'
    read_chat([user("Send it"), {"role": "assistant", "tool_calls": calls}])


def test_a_template_that_takes_parts_gets_parts() -> None:
    text = "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }}</s>{% endfor %}"
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(TWO_TURNS), (side, side), LearnRule())
    assert chat.sides[0].text.startswith(b"user: What is 2+2?</s>assistant: It is 4.</s>")


def test_a_template_for_tools_takes_a_chat_without_any() -> None:
    """Hermes' and Command R+'s `tool_use` loop over tools, and were refused with all chats."""
    text = "{% for t in tools %}{{ t.function.name }}\n{% endfor %}" + template("chatml").text
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    for tools, before in (((), b""), ([WEATHER], b"weather\n")):
        chat = render_chat(read_chat(TWO_TURNS, [*tools]), (side, side), LearnRule())
        assert chat.sides[0].text.startswith(before + b"<|im_start|>user")
        assert _said(chat) == ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n"]


def test_the_day_of_a_template_is_the_one_that_is_given() -> None:
    text = "{{ strftime_now('%Y/%m/%d') }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    side = settle_speaker(ChatTemplate(text, NAMES, {"today": "2026-01-31"}), (), side="student")
    chat = render_chat(read_chat(TWO_TURNS), (side, side), LearnRule())
    assert chat.sides[0].text.startswith(b"2026/01/31What is")


_ALL = "{%% for m in messages %%}[%s]</s>{%% endfor %%}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_ALL % "{{ m.content if loop.index0 < 2 else '' }}", "drops the content of message 2"),
        (_ALL % "{{ m.content }}{{ m.content if loop.index0 == 2 }}", "content of message 2 twice"),
        (
            "{% for m in messages[2:] + messages[:2] %}[{{ m.content }}]</s>{% endfor %}",
            "moves the content of message 0 behind the content of message 3",
        ),
        (_ALL % "{{ m.content | replace('4', 'four') }}", "the content of message 1 changes"),
        (
            _ALL % "{{ m.content }}{{ '!' if '4' in m.content }}",
            "what it puts behind the content of message 1 changes",
        ),
    ],
)
def test_what_a_template_does_to_a_text_is_named_with_its_message(text: str, words: str) -> None:
    side = settle_speaker(ChatTemplate(text, NAMES), (), side="student")
    with pytest.raises(ChatError, match=f"student: .*{words}"):
        render_chat(read_chat(TWO_TURNS), (side, speaker("chatml")), LearnRule())


def test_thoughts_within_a_content_are_refused_with_the_remedy() -> None:
    chat = [user("x"), said("<think>\nhm\n</think>\n\nx")]
    with pytest.raises(ChatError, match="give what was thought as reasoning_content"):
        _render(chat, "qwen3")


def test_a_system_message_in_the_middle() -> None:
    chat = [*TWO_TURNS[:2], {"role": "system", "content": "Now in German."}, *TWO_TURNS[2:]]
    assert _said(_render(chat, "chatml")) == ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n"]
    with pytest.raises(ChatError, match="teacher: the chat template refuses it"):
        _render(chat, "chatml", "gemma")


def test_the_sandbox_holds_also_where_it_remembers() -> None:
    """What a template may reach, and what it gets, is as in transformers, once and once more."""
    values = ("m.content", "m", "ns", "loop", "messages", "'{0.__class__}'", "raise_exception")
    names = ("format", "__class__", "append", "update", "pop", "keys", "x", "index", "func_code")
    calls = [f"{value}.{name}" for value in values for name in names]
    calls += [f"{value}['{name}']" for value in values for name in names]
    calls += ["'{0.__class__}'.format(m)", "('{0.__class__}' | attr('format'))(m)", "m.update(a=1)"]
    calls += ["messages.append(m)", "m.content.upper()", "m.items() | list", "m.content.split('m')"]
    for call in calls:
        text = (
            "{% set ns = namespace(x='{0.__class__}') %}{% for m in messages %}"
            f"{{{{ m.content }}}}{{{{ {call} is defined }}}}{{{{ {call} }}}}{{% endfor %}}"
        )
        ours = ChatTemplate(text, NAMES)
        for _ in range(2):
            assert _result(lambda: ours.render(TWO_TURNS)) == _result(  # noqa: B023
                lambda: render_jinja_template([TWO_TURNS], chat_template=text, **NAMES)[0][0]  # noqa: B023
            )


def _result(render: Callable[[], str]) -> str:
    """Return a rendering without addresses, or the kind of error in its way."""
    try:
        return re.sub("0x[0-9a-f]+", "", render())
    except ChatError as error:
        return type(error.__cause__).__name__
    except Exception as error:
        return type(error).__name__


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=4), st.sampled_from(STOCK))
def test_any_texts_are_found_or_refused(turns: list[tuple[str, str]], name: str) -> None:
    messages = [m for question, answer in turns for m in (user(question), said(answer))]
    try:
        chat = _render(messages, name, "chatml")
    except ChatError as error:
        refused = str(error)
        # A text that a template reads, or nothing but white space.
        assert "think" in refused or "none of its messages" in refused
        return
    for side in (0, 1):
        assert _put_together(chat, side) == chat.sides[side].text
    assert chat.sides[1].text.decode() == "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages
    )
    assert np.all(np.diff(np.array(chat.learned).reshape(-1)) >= 0)
