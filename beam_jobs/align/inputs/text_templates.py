r"""`--text-template '{question}\n{answer}'`: a text from several fields."""

import re
from functools import lru_cache
from typing import NamedTuple

_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\", "{{": "{", "}}": "}"}
_TOKEN = re.compile(r"\\.|\{\{|\}\}|\{(?P<field>[^{}]*)\}|[{}]|\\\Z", re.DOTALL)


class TemplatePart(NamedTuple):
    """Literal text, then a field's name, "" at the end."""

    literal: str
    field: str


@lru_cache
def parse_template(template: str) -> tuple[TemplatePart, ...]:
    r"""Return the parts of a template.

    `\n`, `\t` and `\\` are escapes; `{{` and `}}` are braces. ValueError for another escape, a lone
    brace, or no field.

    Example:
        >>> parse_template(r"Q: {question}\n")
        (TemplatePart(literal='Q: ', field='question'), TemplatePart(literal='\n', field=''))
    """
    parts: list[TemplatePart] = []
    literal, end = "", 0
    for token in _TOKEN.finditer(template):
        literal += template[end : token.start()]
        end = token.end()
        if token["field"]:
            parts.append(TemplatePart(literal, token["field"]))
            literal = ""
        elif token[0] in _ESCAPES:
            literal += _ESCAPES[token[0]]
        else:
            raise ValueError(
                f'"{token[0]}" at character {token.start()} of the template {template!r} means '
                r"nothing: write {field}, \n, \t, \\, {{ or }}"
            )
    literal += template[end:]
    if not parts:
        raise ValueError(f"the template {template!r} names no field; write such as {{question}}")
    return (*parts, TemplatePart(literal, "")) if literal else tuple(parts)
