"""Where a template puts texts is proven, or the chat is refused with its message."""

import pytest

from pipeline.chats.habits import settle_speaker
from pipeline.chats.messages import ChatError, read_chat
from pipeline.chats.rendering import Learn, LearnRule, render_chat, restore_chat
from pipeline.chats.templates import ChatTemplate
from tests.support.chats import (
    CONTROLS,
    NAMES,
    TOOLS,
    TWO_TURNS,
    WEATHER,
    put_together,
    render_in,
    said,
    said_in,
    speaker,
    user,
)


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
    assert [put_together(rendered, n) == rendered.sides[n].text for n in (0, 1)] == [True, True]
    call = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}'
    results = ["18 C"] if result == "18 C" else []
    expected = [call, "18 degrees."]
    if learn == "all":
        expected = ["Weather in Bonn?", call, *results, "18 degrees."]
    assert said_in(rendered) == expected
    assert restore_chat(rendered.messages, rendered.text) == chat


def test_only_a_result_may_be_written_as_json() -> None:
    side = settle_speaker(
        ChatTemplate(_ALL % "{{ m.content | tojson }}", NAMES), (), side="student"
    )
    with pytest.raises(ChatError, match="the content of message 0 changes"):
        render_chat(read_chat([user('"Hi"'), said("Hello")]), (side, side), LearnRule())


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
    assert said_in(chat)[0].startswith('<tool_call>\n{"name": "weather"')  # learned all the same
    assert said_in(chat, 1)[0] == "call weather with " + arguments.decode() + "</s>"
    assert all(put_together(chat, side) == chat.sides[side].text for side in (0, 1))


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
        render_in(chat, "qwen3")
