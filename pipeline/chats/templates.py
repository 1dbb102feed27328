"""A model's chat template, rendered as in `transformers`, and always the same."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from hashlib import sha256
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pipeline.chats.messages import CALLS, CONTENT, REASONING, ChatError

TODAY = "today"
"""The option with the day that `strftime_now` gives; without it templates take their own."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with everything but the chat that decides its rendering.

    Attributes:
        text: in Jinja.
        names: its strings for `bos_token`, `eos_token` and so on.
        options: further values, such as `enable_thinking`.
        parts: it takes contents only as lists of parts.
        json_arguments: it takes calls' arguments only as JSON.
        null_content: it shows calls only if the content is None, not missing.
        tools_list: it takes no tools only as an empty list.
    """

    text: str
    names: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: bool = False
    json_arguments: bool = False
    null_content: bool = False
    tools_list: bool = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a chat; ChatError with the template's message if it refuses it."""
        values = {**self.names, **self.options, "add_generation_prompt": add_generation_prompt}
        try:
            template = _compile(self.text, self.options.get(TODAY, ""))
            given = [self._given(message) for message in messages]
            taken = list(tools) or ([] if self.tools_list else None)
            return template.render(messages=given, tools=taken, documents=None, **values)
        except Exception as error:  # of any kind: a template is a program
            raise ChatError(f"the chat template refuses it: {_words(error)}") from error

    @property
    def sha256(self) -> str:
        """64 hex digits of the template's text."""
        return sha256(self.text.encode()).hexdigest()

    def _given(self, message: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(message)
        if REASONING in given:
            given["thinking"] = given[REASONING]
        if self.parts and CONTENT in given:
            given[CONTENT] = [{"type": "text", "text": given[CONTENT]}]
        if self.null_content and CALLS in given:
            given.setdefault(CONTENT, None)
        if self.json_arguments and CALLS in given:
            given[CALLS] = [_with_json(call) for call in given[CALLS]]
        return given

    def __hash__(self) -> int:
        return hash(self.text)


def _with_json(call: Any) -> Any:
    inner = call.get("function") if isinstance(call, dict) else None
    if not isinstance(inner, dict) or isinstance(inner.get("arguments"), str):
        return call
    return {**call, "function": {**inner, "arguments": to_json(inner.get("arguments"))}}


def _words(error: Exception) -> str:
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if "strftime_now" in words:
        return "it asks for the day of rendering (vocag align --template-options today=2026-01-31)"
    if missing := re.fullmatch(r"UndefinedError: '(\w+)' is undefined", words):
        return f"it asks for {missing[1]} (vocag align --template-options {missing[1]}=VALUE)"
    return words if len(words) < 300 else f"{words[:300]}…"


class _Marks(Extension):
    """`{% generation %}`, which marks an assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_BUILTIN_TYPES = frozenset({str, dict, list, tuple})
_STATE_TYPES = frozenset({LoopContext, Namespace})
_DICT_NAMES = frozenset(dir({}))


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that remembers what is safe: checks take most of a rendering's time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: set[tuple[type, str]] = set()

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind, attribute) in self._safe:
            try:
                return getattr(obj, attribute)
            except AttributeError:  # of this namespace, not of an earlier one
                return self.undefined(obj=obj, name=attribute)
        found = super().getattr(obj, attribute)
        if kind in _BUILTIN_TYPES:
            is_safe = type(found) is BuiltinMethodType  # `format` comes wrapped
        else:
            is_safe = kind in _STATE_TYPES and not isinstance(found, jinja2.Undefined)
        if is_safe:
            self._safe.add((kind, attribute))
        return found

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument not in _DICT_NAMES:
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


@lru_cache(maxsize=16)
def _compile(text: str, today: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _refuse
    if today:
        environment.globals["strftime_now"] = date.fromisoformat(today).strftime
    template = environment.from_string(text)
    template.globals = {**template.globals}  # a ChainMap costs more than a short rendering
    return template


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as `transformers` gives it to templates."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
