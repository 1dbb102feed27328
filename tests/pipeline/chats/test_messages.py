"""What a record must hold to be a conversation, and what is made of its spellings."""

from typing import Any

import orjson
import pyarrow as pa
import pytest

from pipeline.chats.messages import Chat, ChatError, decode_chat, read_chat
from tests.support.chats import TOOLS, WEATHER, said, user


def test_contents_may_be_parts_and_nothing_is_none() -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    given = [{"role": "user", "content": parts, "name": None}, said("Hello", thinking="Well.")]
    chat = read_chat(given)
    assert chat.messages == (user("Hi there"), said("Hello", reasoning_content="Well."))
    assert [(t.message, t.field, t.text) for t in chat.texts()] == [
        (0, "content", "Hi there"),
        (1, "reasoning_content", "Well."),
        (1, "content", "Hello"),
    ]


def test_messages_and_tools_may_be_json_and_so_may_arguments() -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    chat = read_chat(
        '[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": ['
        '{"function": {"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}}]}]',
        '[{"type": "function"}]',
    )
    assert chat.tools == ({"type": "function"},)
    assert chat.messages[1]["tool_calls"] == [
        {**call, "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    ]


def test_each_tool_may_be_json_and_is_an_object() -> None:
    """Templates wrote a string's quotes and escapes instead of the tool."""
    assert read_chat([user("x")], [orjson.dumps(WEATHER).decode()]).tools == (WEATHER,)
    with pytest.raises(ChatError, match="one of its tools is of type list, not an object"):
        read_chat([user("x")], [WEATHER, "[]"])
    with pytest.raises(ChatError, match="its tools are a string that isn't JSON"):
        read_chat([user("x")], ["weather"])


def test_tools_of_a_table_whose_structs_have_every_rows_fields_are_refused() -> None:
    """Their calls' arguments were learned with the other tools' as null."""
    tools = [
        {"function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}}
        for name in ("city", "code")
    ]
    rows = [{"tools": [tool]} for tool in tools]
    table = pa.Table.from_pylist(rows)
    for row, (held, tool) in zip(rows, zip(table.to_pylist(), tools, strict=True), strict=True):
        assert read_chat([user("x")], row["tools"]).tools == (tool,)
        with pytest.raises(ChatError, match="properties that are null, as in a table"):
            read_chat([user("x")], held["tools"])


def test_what_is_encoded_is_read_back() -> None:
    chat = read_chat(TOOLS, [WEATHER])
    again = decode_chat(chat.encode())
    assert Chat(tuple(again.messages), tuple(again.tools)) == chat


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("no JSON", "a string that isn't JSON"),
        ([], "aren't a list of objects"),
        (["Hi"], "message 0 is of type str"),
        ([{"from": "human", "value": "Hi"}], 'rename them to "role" and "content"'),
        (
            [user("x"), {"role": "function", "content": "y"}],
            "message 1 has role 'function', not one of .*, tool: rename it to tool",
        ),
        ([{"role": "Human", "content": "y"}], "'Human', not one of .*: rename it to user"),
        ([{"role": "poet", "content": "y"}], "has role 'poet', not one of .*, tool$"),
        ([{"role": "user"}], "message 0 of role user has neither content nor tool_calls"),
        ([user("x"), {"role": "user", "content": 7}], "content of message 1 is of type int"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "message 0 has a part of type image: only text",
        ),
        ([user("a\ud800")], "content of message 0 is not Unicode"),
        ([{**user("x"), "tool_calls": [1]}], "message 0 of role user has tool_calls"),
        ([said("x", weight=0.5)], "message 0 has weight 0.5: it is learned with 1, not with 0"),
        # As deep as parsers of JSON go.
        ([{**said("x"), "tool_calls": orjson.loads("[" * 1000 + "]" * 1000)}], "has no form in"),
        (
            [user("x"), {"role": "assistant", "content": "", "function_call": {"name": "f"}}],
            "message 1 has function_call, the older form of a call: give tool_calls",
        ),
    ],
)
def test_what_is_no_chat_is_refused_with_its_message(messages: Any, words: str) -> None:
    with pytest.raises(ChatError, match=words):
        read_chat(messages)


def test_tools_that_are_nested_too_deeply_are_refused() -> None:
    deep = orjson.loads('{"properties": ' * 900 + "{}" + "}" * 900)
    with pytest.raises(ChatError, match="has no form in JSON"):
        read_chat([user("x")], [deep])
