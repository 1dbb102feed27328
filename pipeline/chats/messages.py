"""Read conversations: checked, and in one form for every spelling."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

ROLES = ("system", "user", "assistant", "tool")
_OTHER_ROLES = {
    **{role: role for role in ROLES},
    **{"developer": "system", "human": "user", "gpt": "assistant", "model": "assistant"},
    **{"function": "tool", "observation": "tool", "ipython": "tool"},
}
"""Others' names, in small letters."""

REASONING, CONTENT, CALLS = "reasoning_content", "content", "tool_calls"
"""The fields whose bytes are a document's, in its order."""

WEIGHT = "weight"
"""0 of a message that isn't to be learned, as OpenAI's fine-tuning reads it."""

_REASONING_NAMES = (REASONING, "thinking", "reasoning")
"""As transformers reads them, the first that is there."""


class ChatError(ValueError):
    """A conversation can't be used; the message never holds its text."""


class Text(NamedTuple):
    """A text of a conversation."""

    message: int
    field: str
    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: messages for templates, and the tools that they may call.

    Contents are strings, reasoning is `reasoning_content`, and no value is None.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] = ()

    def texts(self) -> Iterator[Text]:
        """Yield the messages' texts, in the document's order."""
        for number, message in enumerate(self.messages):
            for field in (REASONING, CONTENT):
                if field in message:
                    yield Text(number, field, message[field])

    def encode(self) -> bytes:
        """Return it as canonical JSON."""
        return orjson.dumps({"messages": self.messages, "tools": self.tools})


def decode_chat(data: bytes) -> Chat:
    """Reverse `Chat.encode`."""
    return Chat(**orjson.loads(data))


def read_chat(messages: Any, tools: Any = None) -> Chat:
    """Read a conversation from a record's fields; ChatError if it is invalid.

    Example:
        >>> read_chat([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]).messages
        ({'role': 'user', 'content': 'Hi'},)
    """
    messages, tools = _parse(messages, "messages"), _parse(tools, "tools")
    if not isinstance(messages, list) or not messages:
        raise ChatError("its messages aren't a list of objects with a role and a content")
    if tools is not None and not isinstance(tools, list):
        raise ChatError(f"its tools are of type {type(tools).__name__}, not a list")
    tools = [_parse(tool, "tools") for tool in tools or ()]  # each may be JSON, too
    for tool in tools:
        if not isinstance(tool, dict):
            raise ChatError(f"one of its tools is of type {type(tool).__name__}, not an object")
    chat = Chat(tuple(map(_read_message, range(len(messages)), messages)), tuple(tools))
    try:
        chat.encode()  # refuses values nested too deeply for what follows
    except TypeError as error:
        raise ChatError(f"a value of it has no form in JSON ({error})") from None
    if _has_null_property(tools):
        raise ChatError(
            "its tools have properties that are null, as in a table whose structs have every "
            "row's fields: give tools, and the arguments of calls, as JSON in strings"
        )
    if _may_be_rounded([tools, *(message.get(CALLS) for message in chat.messages)]):
        raise ChatError("its tools or calls hold a number beyond 64 bits, which was rounded")
    return chat


def _has_null_property(schema: Any) -> bool:
    """Whether an object of a JSON schema has a property that is null."""
    if isinstance(schema, list):
        return any(map(_has_null_property, schema))
    if not isinstance(schema, dict):
        return False
    held = schema.get("properties")
    is_null = isinstance(held, dict) and None in held.values()
    return is_null or any(map(_has_null_property, schema.values()))


def _may_be_rounded(value: Any) -> bool:
    """Whether a value holds what may have been an integer beyond 64 bits."""
    if isinstance(value, dict):
        return any(map(_may_be_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_may_be_rounded, value))
    return isinstance(value, float) and abs(value) >= 2.0**63 and value.is_integer()


def _parse(value: Any, what: str) -> Any:
    """Parse a value that tables hold as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except ValueError as error:
        raise ChatError(f"its {what} are a string that isn't JSON ({error})") from None


def _read_message(number: int, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise ChatError(f"message {number} is of type {type(given).__name__}, not an object")
    message = {name: value for name, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        more = ""
        if role is None and "from" in message:
            more = (
                '; it has "from" and "value": rename them to "role" and "content", human to user '
                "and gpt to assistant"
            )
        elif isinstance(role, str) and role.lower() in _OTHER_ROLES:
            more = f": rename it to {_OTHER_ROLES[role.lower()]}"
        raise ChatError(f"message {number} has role {role!r}, not one of {', '.join(ROLES)}{more}")
    if message.get(WEIGHT, 1) not in (0, 1):
        raise ChatError(
            f"message {number} has weight {message[WEIGHT]!r}: it is learned with 1, not with 0"
        )
    said = [message.pop(name) for name in _REASONING_NAMES if name in message]
    if said:
        message[REASONING] = _require_text(number, REASONING, said[0])
    if message.get("function_call"):  # templates know it no longer, and would drop it
        raise ChatError(
            f"message {number} has function_call, the older form of a call: give tool_calls, such "
            'as [{"type": "function", "function": {"name": …, "arguments": …}}]'
        )
    calls = message.pop(CALLS, None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ChatError(
                f"message {number} of role {role} has tool_calls: only an assistant's message may, "
                "as a list"
            )
        message[CALLS] = [*map(_read_call, calls)]
    if CONTENT in message:
        message[CONTENT] = _read_content(number, message[CONTENT])
    elif not calls:
        raise ChatError(f"message {number} of role {role} has neither content nor tool_calls")
    return message


def _read_call(call: Any) -> Any:
    """Parse a call's arguments, which some services give as JSON."""
    inner = call.get("function") if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(inner["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**inner, "arguments": arguments}}


def _read_content(number: int, content: Any) -> str:
    if not isinstance(content, list):
        return _require_text(number, CONTENT, content)
    parts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise ChatError(f"message {number} has a part of type {kind}: only text can be aligned")
        parts.append(_require_text(number, CONTENT, part.get("text")))
    return "".join(parts)


def _require_text(number: int, field: str, value: Any) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ChatError(f"{field} of message {number} is of type {kind}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ChatError(
            f"{field} of message {number} is not Unicode text ({error.reason})"
        ) from None
    return value
