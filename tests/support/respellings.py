r"""Answers of MATH spelt otherwise, and answers that look like them and are wrong.

A row is a rule: it gives another spelling of an answer, or None where it doesn't apply. The rules
know LaTeX only as far as the 500 answers need it.
"""

import re
from collections.abc import Callable, Mapping

Rule = Callable[[str], str | None]

_FRACTION = re.compile(r"(-?)\\d?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_MIXED = re.compile(r"(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_INTEGER = re.compile(r"(-?\d+)")
_TEXT = re.compile(r"\\text\{(.*)\}")
_UNIT = re.compile(r"(.*?\S)\s*\\(?:text|mbox)\{\s*([a-z]+)\}(\^2)?")


def respell(answers: list[str], rule: Rule) -> list[tuple[str, str]]:
    """Return (answer, its other spelling) of all that a rule changes."""
    made = ((answer, rule(answer)) for answer in answers)
    return [(answer, other) for answer, other in made if other is not None and other != answer]


def _sub(pattern: str, replacement: str, *, unless: str = "(?!)", only: str = "") -> Rule:
    """Replace what a pattern finds, in answers that hold `only` and not `unless`."""

    def rule(answer: str) -> str | None:
        if re.search(unless, answer) or not re.search(only, answer):
            return None
        return re.sub(pattern, replacement, answer)

    return rule


def _whole(pattern: re.Pattern[str], write: Callable[..., str | None]) -> Rule:
    """Write the groups of a pattern anew, where it is all of an answer."""

    def rule(answer: str) -> str | None:
        found = pattern.fullmatch(answer)
        return write(*found.groups("")) if found else None

    return rule


def _fraction(write: Callable[[str, int, int], str]) -> Rule:
    return _whole(_FRACTION, lambda sign, a, b, c, d: write(sign, int(a or b), int(c or d)))


def _integer(write: Callable[[int], str | None]) -> Rule:
    return _whole(_INTEGER, lambda digits: write(int(digits)))


def _spaces(answer: str) -> str | None:
    if "text" in answer or "mbox" in answer:
        return None
    spaced = re.sub(r"(?<=[\w}\])])([-+=])(?=[\w\\(])", r" \1 ", answer)
    spaced = re.sub(r",(?!\d{3}|\\!)", " , ", spaced)
    spaced = re.sub(r"(\\(?:pi|sqrt|frac|cot|circ))(?![A-Za-z])", r" \1 ", spaced)
    return re.sub(r"(?<!\\)([(){}\[\]])", r" \1 ", spaced)


def _braced(answer: str) -> str:
    """`\\frac12` and `\\sqrt2` with their braces."""
    whole = re.sub(r"\\(d?)frac\s*(\d)\s*(\d)(?!\d)", r"\\\1frac{\2}{\3}", answer)
    return re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", whole)


def _unbraced(answer: str) -> str:
    short = re.sub(r"\\(d?)frac\{(\d)\}\{(\d)\}", r"\\\1frac\2\3", answer)
    return re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", short)


def _tall_brackets(answer: str) -> str | None:
    if "text" in answer or "\\{" in answer:
        return None
    bracket = r"(?<!\\left)(?<!\\left )(?<!\\right)(?<!\\right )([()\[\]])"
    return re.sub(bracket, lambda f: rf"\{'left' if f[1] in '([' else 'right'}{f[1]}", answer)


def _array(answer: str) -> str | None:
    if "pmatrix" not in answer:
        return None
    inside = re.sub(r"\\(begin|end)\{pmatrix\}", "", answer).strip()
    columns = "c" * (1 + inside.partition(r"\\")[0].count("&"))
    return rf"\left(\begin{{array}}{{{columns}}} {inside} \end{{array}}\right)"


def _ascii(answer: str) -> str | None:
    """Roots and pi as programs write them."""
    if not re.search(r"\\sqrt|\\pi", answer) or "frac" in answer:
        return None
    plain = re.sub(r"(\d)\s*(?=\\sqrt|\\pi)", r"\1*", answer)
    return re.sub(r"\\sqrt(?:\{(\d+)\}|(\d))", r"sqrt(\1\2)", plain).replace(r"\pi", "pi")


HARMLESS: Mapping[str, Rule] = {
    # A space between a command and a letter is needed.
    "no spaces": _sub(r"(?<![A-Za-z]) | (?![A-Za-z])", ""),
    "spaces": _spaces,
    "thin spaces": _sub(r",(?=[^\s\\])(?!\d{3})", r",\\ "),
    "bare text": _whole(_TEXT, lambda text: text),
    "bold text": _whole(_TEXT, lambda text: rf"\textbf{{{text}}}"),
    "capitals": _whole(_TEXT, lambda text: rf"\text{{{text.upper()}}}"),
    "4 digits": _fraction(lambda sign, over, under: f"{sign}{over / under:.4f}"),
    "10 digits": _fraction(lambda sign, over, under: f"{sign}{over / under:.10f}"),
    "a slash": _fraction(lambda sign, over, under: f"{sign}{over}/{under}"),
    "not reduced": _fraction(lambda sign, a, b: rf"{sign}\frac{{{3 * a}}}{{{3 * b}}}"),
    "dfrac": _sub(r"\\frac", r"\\dfrac"),
    "tfrac": _sub(r"\\d?frac", r"\\tfrac"),
    "braces": _braced,
    "no braces": _unbraced,
    "an improper fraction": _whole(
        _MIXED, lambda n, a, b: rf"\frac{{{int(n) * int(b) + int(a)}}}{{{b}}}"
    ),
    "tall brackets": _tall_brackets,
    "plain brackets": _sub(r"\\(?:left|right)\s*", ""),
    "bmatrix": _sub("pmatrix", "bmatrix"),
    "array": _array,
    "frac in a matrix": _sub(r"(\d+)/(\d+)", r"\\frac{\1}{\2}", only="pmatrix"),
    "dollars": lambda answer: f"${answer}$",
    "a full stop": lambda answer: f"{answer}.",
    "one decimal": _integer(lambda number: f"{number}.0"),
    "thousands": _integer(lambda number: f"{number:,}"),
    "no thousands": _sub(r"(?<=\d),(?:\\!)?\s*(?=\d{3}(?!\d))", "", unless=r"\("),
    "a name": _integer(lambda number: f"x = {number}"),
    "no name": _sub(r"^[xy]\s*(?:=|\\in)\s*(?=[-\d\[(])", ""),
    "braced degrees": _sub(r"\^\\circ", r"^{\\circ}"),
    "no degrees": _sub(r"\^\\circ", ""),
    "degrees": _sub(r"\^\\circ", r" \\text{ degrees}"),
    "no unit": _whole(_UNIT, lambda number, *_: number),
    "plain unit": _whole(_UNIT, lambda number, unit, to: rf"{number} \text{{ {unit}}}{to}"),
    "no currency": _sub(r"\\\$", ""),
    "leading zero": _sub(r"^\.", "0."),
    # A mixed number would change its value.
    "a dot for times": _sub(r"(\d)\s*(\\sqrt|\\pi)", r"\1 \\cdot \2"),
    "ASCII": _ascii,
    "subscript": _sub(r"_(\d)$", r"_{\1}"),
}


_INTERVAL = r"\\cup|\\infty|\\in |[\[\]]"
_OTHER_END = {"(": "[", "[": "(", ")": "]", "]": ")"}


def _open_end(answer: str) -> str | None:
    """The first end that isn't infinite, the other way."""
    if not re.search(_INTERVAL, answer):
        return None
    return re.sub(r"[(\[](?!-\\infty)", lambda found: _OTHER_END[found[0]], answer, count=1)


def _closed_end(answer: str) -> str | None:
    """The last end that isn't infinite, the other way."""
    ends = list(re.finditer(r"(?<!infty)[)\]]", answer))
    if not ends or not re.search(_INTERVAL, answer):
        return None
    last = ends[-1].start()
    return answer[:last] + _OTHER_END[answer[last]] + answer[last + 1 :]


def _lost_letter(answer: str) -> str | None:
    found = re.search(r"(?<![A-Za-z\\])([a-z])(?=[-+)])", answer)
    return answer[: found.start()] + answer[found.end() :] if found and len(answer) > 3 else None


def _other_sign(answer: str) -> str | None:
    if not re.search(r"[\w}] ?[-+] ?[\w\\]", answer):
        return None
    return re.sub(r"(?<=[\w}])( ?)([-+])", lambda f: f[1] + "+-"[f[2] == "+"], answer, count=1)


def _negative(answer: str) -> str | None:
    """Minus an answer; nothing where that could be the same set."""
    if not re.match(r"[\d.\\]", answer) or re.search(
        r"text|mbox|left|begin|\{1|\\\$|_|\\pm|,", answer
    ):
        return None
    return f"-{answer}" if answer != "0" and answer != r"\cot x" else None


def _other_exponent(answer: str) -> str | None:
    found = re.search(r"\^(\d)", answer)
    if not found or "mbox" in answer:
        return None
    return f"{answer[: found.start()]}^{int(found[1]) + 1}{answer[found.end() :]}"


def _lost_part(answer: str) -> str | None:
    if re.search(r"[(\[]", answer) or not re.search(r",(?!\d{3}|\\!)", answer):
        return None
    return answer.rpartition(",")[0]


_WORDS = {"even": "odd", "east": "west", "Evelyn": "Navin", "Navin": "Evelyn"}
_WORDS |= {"(B)": "(C)", "(C)": "(B)", "(E)": "(D)", "ellipse": "parabola"}
_POINT = re.compile(r"\(([^,()]+),([^,()]+)\)")
_ROWS = re.compile(r"\\begin\{pmatrix\}(.*?)\\\\(.*)\\end\{pmatrix\}")

WRONG: Mapping[str, Rule] = {
    "open end": _open_end,
    "closed end": _closed_end,
    "swapped": _whole(_POINT, lambda one, two: f"({two.strip()},{one.strip()})"),
    "no brackets of factors": {"(a+5)(b+2)": "a+5b+2"}.get,
    "a lost letter": _lost_letter,
    "the other sign": _other_sign,
    "negative": _negative,
    "one more": _integer(lambda number: str(number + 1) if abs(number) < 5000 else None),
    "third digit": _fraction(lambda sign, over, under: f"{sign}{over / under * 1.001:.6f}"),
    "upside down": _fraction(
        lambda sign, over, under: rf"{sign}\frac{{{under}}}{{{over}}}" if over > 1 else ""
    ),
    "another word": _whole(_TEXT, _WORDS.get),
    "another base": _whole(
        re.compile(r"(\d+)_\{?(\d)\}?"), lambda digits, base: f"{digits}_{int(base) + 1}"
    ),
    "another row": _whole(_ROWS, lambda one, two: rf"\begin{{pmatrix}}{two}\\{one}\end{{pmatrix}}"),
    "transposed": _sub(r"\\\\ ", "& ", only="pmatrix", unless="&"),
    "another exponent": _other_exponent,
    "another root": _sub(r"\\sqrt\{?(\d+)\}?", r"\\sqrt{1\1}"),
    "a lost part": _lost_part,
    "one of two": _sub(r"\\pm", "+"),
    "another variable": _sub(
        r"(?<![A-Za-z\\])[kxnr](?![A-Za-z])", "w", unless=r"^[xy] ?(?:=|\\in)"
    ),
}
