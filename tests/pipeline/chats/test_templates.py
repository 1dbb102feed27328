"""Templates: the forms that they take, and the same rendering always."""

import re
from collections.abc import Callable

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.chats.habits import settle_speaker
from pipeline.chats.messages import ChatError, read_chat
from pipeline.chats.rendering import LearnRule, render_chat
from pipeline.chats.templates import ChatTemplate
from tests.support.chats import (
    CALLS,
    CONTROLS,
    NAMES,
    TOOLS,
    TWO_TURNS,
    WEATHER,
    said_in,
    template,
)


def test_a_template_that_shows_calls_for_null_gets_null() -> None:
    text = (
        "{% for m in messages %}<s>{% if m.tool_calls and m.content is none %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% else %}{{ m.content }}"
        "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], {"role": "assistant", "content": None, **CALLS}, *TOOLS[2:]]
    assert said_in(render_chat(read_chat(messages), (side, side), LearnRule()))[0] == "weather</s>"
    with pytest.raises(ChatError, match="drops the tool_calls of message 1"):
        render_chat(read_chat(TOOLS), (side, side), LearnRule())


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
        assert said_in(chat) == ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n"]


def test_the_day_of_a_template_is_the_one_that_is_given() -> None:
    text = "{{ strftime_now('%Y/%m/%d') }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    side = settle_speaker(ChatTemplate(text, NAMES, {"today": "2026-01-31"}), (), side="student")
    chat = render_chat(read_chat(TWO_TURNS), (side, side), LearnRule())
    assert chat.sides[0].text.startswith(b"2026/01/31What is")


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
