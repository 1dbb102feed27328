"""Decide whether two answers are equal.

They are compared as spellings, as numbers (within 1e-4), part by part (points, intervals, lists,
matrices), and by math-verify. math-evaluation-harness, which removes brackets and single letters as
units, also accepts wrong answers.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from math_verify.utils import timeout

from pipeline.evaluation.spelling import plain_spelling

TOLERANCE = 1e-4
"""Relative, as the harness's."""

_UNIT = r"(?:[A-Za-z]{2,15}\.?|(?<=\s)[cdghlmst]\.?)"
_PLAIN = re.compile(rf"(-?\d+\.?\d*)(?:\s*{_UNIT}(?:\s+{_UNIT})?)?")
_FRACTION = re.compile(r"(-?\d+)/(\d+)")
_IN_BASE = re.compile(r"\d+_\d+")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}")
_COMMAND = re.compile(r"\\[A-Za-z]+|\b(?:sqrt|sin|cos|tan|log|ln|exp|or|and)\b|pmatrix")
_WORD = re.compile(r"[A-Za-z]{3,}")
_SECONDS = 3


def is_equal(answer: str, reference: str) -> bool:
    """Whether two answers are equal.

    A number's hundredth and hundredfold are right, too, as in the harness: 25 %, 25 and 0.25.
    """
    if answer.lower() == reference.lower():
        return bool(reference)
    return _is_same(plain_spelling(answer), plain_spelling(reference), scales=(0.01, 1, 100))


def _is_same(answer: str, reference: str, scales: Sequence[float] = (1,)) -> bool:
    number, wanted = _number(answer), _number(reference)
    if number is not None and wanted is not None:
        return any(_is_close(number, scale * wanted) for scale in scales)
    if answer.lower() == reference.lower():
        return bool(reference)
    if _IN_BASE.fullmatch(answer) or _IN_BASE.fullmatch(reference):
        return False  # math-verify would take 204_5 for 204
    one, other = _split(answer), _split(reference)
    if one and other:
        same_shape = (one.kind, len(one.parts)) == (other.kind, len(other.parts))
        if same_shape and all(map(_is_same, one.parts, other.parts)):
            return True
        if one.is_ordered and other.is_ordered:
            return False
    if not _is_expression(answer) or not _is_expression(reference):
        return False
    return _is_same_expression(answer, reference)


class _Parts(NamedTuple):
    """A composite answer's brackets or matrix shape, and its parts."""

    kind: str
    parts: Sequence[str]

    @property
    def is_ordered(self) -> bool:
        """Whether order matters, unlike in sets and bare lists."""
        return self.kind not in ("", "{}")


def _split(text: str) -> _Parts | None:
    if found := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in found[1].split(r"\\") if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return _Parts(f"matrix {shape}", [cell.strip() for row in rows for cell in row])
    kind, inside = "", text.replace(r"\{", "{").replace(r"\}", "}")
    if inside[:1] in ("(", "[", "{") and inside[-1:] in (")", "]", "}"):
        kind, inside = inside[0] + inside[-1], inside[1:-1]
    parts, depth, start = [], 0, 0
    for place, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:  # (0,9) \cup (9,36): its brackets aren't a pair
            return None
        if character == "," and not depth:
            parts.append(inside[start:place].strip())
            start = place + 1
    parts.append(inside[start:].strip())
    return _Parts(kind, parts) if len(parts) > 1 else None


def _number(text: str) -> float | None:
    text = re.sub(r"(?<=\d),\s*(?=\d{3}(?!\d))", "", text)
    if found := _PLAIN.fullmatch(text):
        return float(found[1])
    if (found := _FRACTION.fullmatch(text)) and int(found[2]):
        return int(found[1]) / int(found[2])
    return None


def _is_close(number: complex, wanted: complex) -> bool:
    return abs(number - wanted) <= TOLERANCE * max(abs(number), abs(wanted))


def _is_expression(text: str) -> bool:
    """Whether a text may be mathematics; from prose math-verify would take any number."""
    return bool(text) and not _WORD.search(_COMMAND.sub("", text))


def _is_same_expression(answer: str, reference: str) -> bool:
    one, other = (parse(f"${text}$", parsing_timeout=_SECONDS) for text in (answer, reference))
    if verify(other, one, timeout_seconds=_SECONDS):
        return True
    if not one or not other:
        return False
    value, wanted = _value(one[0]), _value(other[0])
    return value is not None and wanted is not None and _is_close(value, wanted)


def _value(expression: object) -> complex | None:
    if not getattr(expression, "is_number", False):  # a text, a set, an equation
        return None
    try:
        value = _evaluate(expression)
    except (TimeoutException, TypeError, ValueError, ArithmeticError):
        return None
    return value if math.isfinite(abs(value)) else None


@timeout(_SECONDS)
def _evaluate(expression: Any) -> complex:
    return complex(expression.evalf())
