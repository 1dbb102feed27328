"""A chat's two renderings: where its texts are, and what is learned."""

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.chats.messages import ChatError, read_chat
from pipeline.chats.rendering import Learn, restore_chat
from tests.support.chats import (
    NAMES,
    STOCK,
    SYSTEM,
    THINKING,
    TWO_TURNS,
    put_together,
    render_in,
    said,
    said_in,
    template,
    user,
)

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


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("kind", _CHATS)
def test_renderings_are_those_of_transformers_and_ranges_are_exact(name: str, kind: str) -> None:
    chat = render_in(_CHATS[kind], name)
    (expected,), _ = render_jinja_template(
        [_CHATS[kind]], chat_template=template(name).text, **NAMES
    )
    side = chat.sides[0]
    same = side.text.decode() == expected  # a difference of 1 MB takes pytest minutes to show
    assert same
    assert put_together(chat, 0) == side.text
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
    assert said_in(render_in(TWO_TURNS, name)) == expected


def test_whose_messages_are_learned_is_asked() -> None:
    assert said_in(render_in(TWO_TURNS, "chatml", learn="last")) == ["6, of course.<|im_end|>\n"]
    assert said_in(render_in(TWO_TURNS, "chatml", end=False)) == ["It is 4.", "6, of course."]
    everybody = render_in(SYSTEM, "chatml", learn="all", end=False)
    assert said_in(everybody) == [message["content"] for message in SYSTEM]


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
    chat = render_in(weighed, "chatml", learn=learn)
    assert said_in(chat) == expected
    assert chat.text.endswith(b"Six?")


def test_reasoning_is_learned_with_its_marks_where_both_sides_show_it() -> None:
    learned = ["<think>\n17*3 is 51.\n</think>\n\n51.<|im_end|>\n"]
    assert said_in(render_in(THINKING, "qwen3")) == learned
    both = render_in(THINKING, "qwen3", "chatml")
    assert said_in(both) == ["51.<|im_end|>\n"]
    assert both.text == b"17*3?17*3 is 51.51."
    assert both.learned == ((16, 19),)


def test_reasoning_of_earlier_turns_that_a_template_drops_is_not_learned() -> None:
    chat = render_in([*THINKING, user("Sure?"), said("Yes.", reasoning_content="Yes.")], "qwen3")
    assert said_in(chat) == ["51.<|im_end|>\n", "<think>\nYes.\n</think>\n\nYes.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("sides", "side"), [(("qwen3", "chatml"), "teacher"), (("chatml", "qwen3"), "student")]
)
def test_a_thought_alone_that_one_side_drops_is_refused(sides: tuple[str, str], side: str) -> None:
    """That side's tokens cover nothing: it ended the whole job."""
    with pytest.raises(ChatError, match=f"{side}: the chat template shows none of its texts"):
        render_in([user(""), said("", reasoning_content="let me think")], *sides)


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


def test_a_system_message_in_the_middle() -> None:
    chat = [*TWO_TURNS[:2], {"role": "system", "content": "Now in German."}, *TWO_TURNS[2:]]
    assert said_in(render_in(chat, "chatml")) == [
        "It is 4.<|im_end|>\n",
        "6, of course.<|im_end|>\n",
    ]
    with pytest.raises(ChatError, match="teacher: the chat template refuses it"):
        render_in(chat, "chatml", "gemma")


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=4), st.sampled_from(STOCK))
def test_any_texts_are_found_or_refused(turns: list[tuple[str, str]], name: str) -> None:
    messages = [m for question, answer in turns for m in (user(question), said(answer))]
    try:
        chat = render_in(messages, name, "chatml")
    except ChatError as error:
        refused = str(error)
        # A text that a template reads, or nothing but white space.
        assert "think" in refused or "none of its messages" in refused
        return
    for side in (0, 1):
        assert put_together(chat, side) == chat.sides[side].text
    assert chat.sides[1].text.decode() == "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages
    )
    assert np.all(np.diff(np.array(chat.learned).reshape(-1)) >= 0)
