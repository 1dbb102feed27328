"""One spelling for answers that LaTeX can write in many."""

import re

_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s+")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?")
_STYLED = r"\\(?:text(?:bf|it|rm)?|mbox|mathrm|mathbf|mathit)\s*\{([^{}]*)\}"
_UNIT = re.compile(rf"(?<=\S)\s*{_STYLED}\s*(?:\^\s*\{{?\d\}}?)?$")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_NAME = re.compile(r"^[A-Za-z]\s*(?:=|\\in(?![A-Za-z]))\s*(?=[^=]+$)")
_ARRAY = re.compile(
    r"\\(begin|end)\s*\{\s*(?:[bvBV]?matrix|array|pmatrix)\s*\}(?:\s*\{[clr| ]*\})?"
)
_WRAPPED = re.compile(r"^\(\s*(\\begin\{pmatrix\}.*\\end\{pmatrix\})\s*\)$")
_PROGRAM = (
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])(?:inf|infinity|oo)(?![A-Za-z])"), r"\\infty "),
)
_SHORT = (
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\w)\s*(\w)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\w)\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\w)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d+|\w)"), r"\\sqrt{\1}"),
    (re.compile(r"(_|\^(?=\s*\{\s*\w\s*\}))\s*\{\s*(\w+)\s*\}"), r"\1\2"),
    (re.compile(r"(?<![\d.])\.(?=\d)"), "0."),
)
_NEEDED = re.compile(r"(?<=\d) (?=\d)|(?<=[A-Za-z]) (?=[A-Za-z])")


def plain_spelling(text: str) -> str:
    r"""Remove what doesn't change an answer's value.

    This is sizes of brackets, kinds of fractions and matrices, fonts, a final unit in \text,
    degrees, percent and dollar signs, and "x =" or "x \in" before it.

    Example:
        >>> plain_spelling(r"x = \left( \dfrac12, \text{east} \right]")
        '(\\frac{1}{2},east]'
    """
    text = _SIZES.sub("", text.replace(r"\!", "").replace("−", "-"))
    text = _DEGREES.sub("", re.sub(r"\\?[$%]", "", text))
    text = _ARRAY.sub(r"\\\1{pmatrix}", text).strip()
    text = _WRAPPED.sub(r"\1", text)
    text = re.sub(_STYLED, r" \1 ", _UNIT.sub("", text))
    for pattern, replacement in (*_PROGRAM, *_SHORT):
        text = pattern.sub(replacement, text)
    text = _NAME.sub("", text.strip())
    return _close_up(text)


def _close_up(text: str) -> str:
    """Remove spaces except between words or numbers."""
    text = _SPACES.sub(" ", text)
    parts = _NEEDED.split(text)
    return " ".join(part.replace(" ", "") for part in parts)
