r"""Answers of MATH spelt otherwise, and answers that look like them and are wrong.

A row is a rule: it gives another spelling of an answer, or None where it doesn't apply. The rules
know LaTeX only as far as the 500 answers need it.
"""

import re
from collections.abc import Callable, Mapping

Rule = Callable[[str], str | None]

_FRACTION = re.compile(r"(-?)\\d?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_INTEGER = re.compile(r"-?\d+")
_BRACKETS = re.compile(r"(?<!\\left)(?<!\\left )(?<!\\right)(?<!\\right )([()\[\]])")
_TEXT = re.compile(r"\\text\{(.*)\}")
_UNIT = re.compile(r"(.*?\S)\s*\\(?:text|mbox)\{\s*([a-z]+)\}(\^2)?")


def respell(answers: list[str], rule: Rule) -> list[tuple[str, str]]:
    """Return (answer, its other spelling) of all that a rule changes."""
    made = ((answer, rule(answer)) for answer in answers)
    return [(answer, other) for answer, other in made if other is not None and other != answer]


def _no_spaces(answer: str) -> str:
    """A space between a command and a letter is needed."""
    return re.sub(r"(?<![A-Za-z]) | (?![A-Za-z])", "", answer)


def _spaces(answer: str) -> str | None:
    if "text" in answer or "mbox" in answer:
        return None
    spaced = re.sub(r"(?<=[\w}\])])([-+=])(?=[\w\\(])", r" \1 ", answer)
    spaced = re.sub(r",(?!\d{3}|\\!)", " , ", spaced)
    spaced = re.sub(r"(\\(?:pi|sqrt|frac|cot|circ))(?![A-Za-z])", r" \1 ", spaced)
    return re.sub(r"(?<!\\)([(){}\[\]])", r" \1 ", spaced)


def _thin_spaces(answer: str) -> str:
    return re.sub(r",(?=[^\s\\])(?!\d{3})", r",\\ ", answer)


def _bare_text(answer: str) -> str | None:
    found = _TEXT.fullmatch(answer)
    return found[1] if found else None


def _fraction(answer: str, write: Callable[[str, int, int], str]) -> str | None:
    found = _FRACTION.fullmatch(answer)
    return write(found[1], int(found[2] or found[3]), int(found[4] or found[5])) if found else None


def _four_digits(answer: str) -> str | None:
    return _fraction(answer, lambda sign, over, under: f"{sign}{over / under:.4f}")


def _many_digits(answer: str) -> str | None:
    return _fraction(answer, lambda sign, over, under: f"{sign}{over / under:.10f}")


def _slash(answer: str) -> str | None:
    return _fraction(answer, lambda sign, over, under: f"{sign}{over}/{under}")


def _not_reduced(answer: str) -> str | None:
    return _fraction(answer, lambda sign, over, under: rf"{sign}\frac{{{3 * over}}}{{{3 * under}}}")


def _display_fractions(answer: str) -> str:
    return re.sub(r"\\frac", r"\\dfrac", answer)


def _text_fractions(answer: str) -> str:
    return re.sub(r"\\d?frac", r"\\tfrac", answer)


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
    return _BRACKETS.sub(
        lambda found: rf"\{'left' if found[1] in '([' else 'right'}{found[1]}", answer
    )


def _plain_brackets(answer: str) -> str:
    return re.sub(r"\\(?:left|right)\s*", "", answer)


def _square_matrix(answer: str) -> str:
    return answer.replace("pmatrix", "bmatrix")


def _array(answer: str) -> str | None:
    if "pmatrix" not in answer:
        return None
    inside = re.sub(r"\\(begin|end)\{pmatrix\}", "", answer).strip()
    columns = "c" * (1 + inside.partition(r"\\")[0].count("&"))
    return rf"\left(\begin{{array}}{{{columns}}} {inside} \end{{array}}\right)"


def _matrix_fractions(answer: str) -> str | None:
    if "pmatrix" not in answer:
        return None
    return re.sub(r"(\d+)/(\d+)", r"\\frac{\1}{\2}", answer)


def _dollars(answer: str) -> str:
    return f"${answer}$"


def _full_stop(answer: str) -> str:
    return f"{answer}."


def _one_decimal(answer: str) -> str | None:
    return f"{answer}.0" if _INTEGER.fullmatch(answer) else None


def _thousands(answer: str) -> str | None:
    return f"{int(answer):,}" if _INTEGER.fullmatch(answer) else None


def _no_thousands(answer: str) -> str:
    return (
        re.sub(r"(?<=\d),(?:\\!)?\s*(?=\d{3}(?!\d))", "", answer) if "(" not in answer else answer
    )


def _named(answer: str) -> str | None:
    return f"x = {answer}" if _INTEGER.fullmatch(answer) else None


def _unnamed(answer: str) -> str:
    return re.sub(r"^[xy]\s*(?:=|\\in)\s*(?=[-\d\[(])", "", answer)


def _braced_degrees(answer: str) -> str:
    return answer.replace(r"^\circ", r"^{\circ}")


def _no_degrees(answer: str) -> str:
    return answer.replace(r"^\circ", "")


def _degrees(answer: str) -> str:
    return answer.replace(r"^\circ", r" \text{ degrees}")


def _no_unit(answer: str) -> str | None:
    found = _UNIT.fullmatch(answer)
    return found[1] if found else None


def _plain_unit(answer: str) -> str | None:
    found = _UNIT.fullmatch(answer)
    return rf"{found[1]} \text{{ {found[2]}}}{found[3] or ''}" if found else None


def _no_currency(answer: str) -> str:
    return answer.replace(r"\$", "")


def _leading_zero(answer: str) -> str:
    return re.sub(r"^\.", "0.", answer)


def _times(answer: str) -> str | None:
    """`2\\sqrt{5}` with a dot; a mixed number would change its value."""
    return re.sub(r"(\d)\s*(\\sqrt|\\pi)", r"\1 \\cdot \2", answer)


def _ascii(answer: str) -> str | None:
    """Roots and pi as programs write them."""
    if not re.search(r"\\sqrt|\\pi", answer) or "frac" in answer:
        return None
    plain = re.sub(r"(\d)\s*(?=\\sqrt|\\pi)", r"\1*", answer)
    return re.sub(r"\\sqrt(?:\{(\d+)\}|(\d))", r"sqrt(\1\2)", plain).replace(r"\pi", "pi")


def _improper(answer: str) -> str | None:
    found = re.fullmatch(r"(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", answer)
    if not found:
        return None
    whole, over, under = map(int, found.groups())
    return rf"\frac{{{whole * under + over}}}{{{under}}}"


def _subscript(answer: str) -> str:
    return re.sub(r"_(\d)$", r"_{\1}", answer)


def _capitals(answer: str) -> str | None:
    found = _TEXT.fullmatch(answer)
    return rf"\text{{{found[1].upper()}}}" if found else None


def _bold_text(answer: str) -> str | None:
    found = _TEXT.fullmatch(answer)
    return rf"\textbf{{{found[1]}}}" if found else None


HARMLESS: Mapping[str, Rule] = {
    "no spaces": _no_spaces,
    "spaces": _spaces,
    "thin spaces": _thin_spaces,
    "bare text": _bare_text,
    "bold text": _bold_text,
    "capitals": _capitals,
    "4 digits": _four_digits,
    "10 digits": _many_digits,
    "a slash": _slash,
    "not reduced": _not_reduced,
    "dfrac": _display_fractions,
    "tfrac": _text_fractions,
    "braces": _braced,
    "no braces": _unbraced,
    "an improper fraction": _improper,
    "tall brackets": _tall_brackets,
    "plain brackets": _plain_brackets,
    "bmatrix": _square_matrix,
    "array": _array,
    "frac in a matrix": _matrix_fractions,
    "dollars": _dollars,
    "a full stop": _full_stop,
    "one decimal": _one_decimal,
    "thousands": _thousands,
    "no thousands": _no_thousands,
    "a name": _named,
    "no name": _unnamed,
    "braced degrees": _braced_degrees,
    "no degrees": _no_degrees,
    "degrees": _degrees,
    "no unit": _no_unit,
    "plain unit": _plain_unit,
    "no currency": _no_currency,
    "leading zero": _leading_zero,
    "a dot for times": _times,
    "ASCII": _ascii,
    "subscript": _subscript,
}


def _open_end(answer: str) -> str | None:
    """The first end that isn't infinite, the other way."""
    if not _is_interval(answer):
        return None
    return re.sub(r"([(\[])(?!-\\infty)", lambda found: "(["[found[1] == "("], answer, count=1)


def _closed_end(answer: str) -> str | None:
    """The last end that isn't infinite, likewise."""
    if not _is_interval(answer):
        return None
    ends = list(re.finditer(r"(?<!infty)[)\]]", answer))
    if not ends:
        return None
    last = ends[-1].start()
    return answer[:last] + ")]"[answer[last] == ")"] + answer[last + 1 :]


def _is_interval(answer: str) -> bool:
    return bool(re.search(r"\\cup|\\infty|\\in |[\[\]]", answer))


def _swapped(answer: str) -> str | None:
    found = re.fullmatch(r"\(([^,()]+),([^,()]+)\)", answer)
    return f"({found[2].strip()},{found[1].strip()})" if found else None


def _no_factor_brackets(answer: str) -> str | None:
    return "a+5b+2" if answer == "(a+5)(b+2)" else None


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


def _one_more(answer: str) -> str | None:
    return str(int(answer) + 1) if _INTEGER.fullmatch(answer) and abs(int(answer)) < 5000 else None


def _third_digit(answer: str) -> str | None:
    return _fraction(answer, lambda sign, over, under: f"{sign}{over / under * 1.001:.6f}")


def _upside_down(answer: str) -> str | None:
    return _fraction(
        answer, lambda sign, over, under: rf"{sign}\frac{{{under}}}{{{over}}}" if over > 1 else ""
    )


def _other_word(answer: str) -> str | None:
    words = {"even": "odd", "east": "west", "Evelyn": "Navin", "Navin": "Evelyn"}
    words |= {"(B)": "(C)", "(C)": "(B)", "(E)": "(D)", "ellipse": "parabola"}
    found = _TEXT.fullmatch(answer)
    return words[found[1]] if found else None


def _other_base(answer: str) -> str | None:
    found = re.fullmatch(r"(\d+)_\{?(\d)\}?", answer)
    return f"{found[1]}_{int(found[2]) + 1}" if found else None


def _other_row(answer: str) -> str | None:
    found = re.fullmatch(r"\\begin\{pmatrix\}(.*?)\\\\(.*)\\end\{pmatrix\}", answer)
    if not found:
        return None
    return rf"\begin{{pmatrix}}{found[2]}\\{found[1]}\end{{pmatrix}}"


def _transposed(answer: str) -> str | None:
    if "pmatrix" not in answer or "&" in answer:
        return None
    return answer.replace(r"\\ ", "& ")


def _other_exponent(answer: str) -> str | None:
    found = re.search(r"\^(\d)", answer)
    if not found or "mbox" in answer:
        return None
    return f"{answer[: found.start()]}^{int(found[1]) + 1}{answer[found.end() :]}"


def _other_root(answer: str) -> str | None:
    return re.sub(r"\\sqrt\{?(\d+)\}?", r"\\sqrt{1\1}", answer)


def _lost_part(answer: str) -> str | None:
    if "(" in answer or not re.search(r",(?!\d{3}|\\!)", answer) or "[" in answer:
        return None
    return answer.rpartition(",")[0]


def _one_of_two(answer: str) -> str | None:
    return answer.replace(r"\pm", "+") if r"\pm" in answer else None


def _another_variable(answer: str) -> str | None:
    named = re.match(r"[xy] ?(?:=|\\in)", answer)
    return None if named else re.sub(r"(?<![A-Za-z\\])[kxnr](?![A-Za-z])", "w", answer)


WRONG: Mapping[str, Rule] = {
    "open end": _open_end,
    "closed end": _closed_end,
    "swapped": _swapped,
    "no brackets of factors": _no_factor_brackets,
    "a lost letter": _lost_letter,
    "the other sign": _other_sign,
    "negative": _negative,
    "one more": _one_more,
    "third digit": _third_digit,
    "upside down": _upside_down,
    "another word": _other_word,
    "another base": _other_base,
    "another row": _other_row,
    "transposed": _transposed,
    "another exponent": _other_exponent,
    "another root": _other_root,
    "a lost part": _lost_part,
    "one of two": _one_of_two,
    "another variable": _another_variable,
}
