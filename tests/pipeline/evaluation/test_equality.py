"""Which answers are one, and which only look like it."""

import pytest

pytest.importorskip("math_verify", reason="needs vocag[evaluate]")

from pathlib import Path

from pipeline.evaluation.answers import answer_of, reference_of
from pipeline.evaluation.data import read_items
from pipeline.evaluation.equality import is_equal
from tests.support.respellings import HARMLESS, WRONG, respell

SHARED = Path(__file__).parents[4] / "shared" / "data" / "benchmarks"

# Of MATH-500's answers: how many a row respells, and how many of those math-evaluation-harness
# (commit db77bc6, sympy 1.12, latex2sympy2-extended for its own latex2sympy) accepts.
ROWS = {
    "no spaces": (45, 43),
    "spaces": (145, 131),
    "thin spaces": (14, 1),
    "bare text": (8, 7),
    "bold text": (8, 0),
    "capitals": (5, 4),
    "4 digits": (56, 49),
    "10 digits": (56, 56),
    "a slash": (56, 56),
    "not reduced": (56, 56),
    "dfrac": (68, 68),
    "tfrac": (70, 70),
    "braces": (6, 6),
    "no braces": (38, 38),
    "an improper fraction": (2, 0),
    "tall brackets": (17, 17),
    "plain brackets": (4, 4),
    "bmatrix": (7, 7),
    "array": (7, 7),
    "frac in a matrix": (3, 3),
    "dollars": (500, 499),
    "a full stop": (500, 500),
    "one decimal": (311, 311),
    "thousands": (20, 20),
    "no thousands": (4, 4),
    "a name": (311, 311),
    "no name": (4, 3),
    "braced degrees": (14, 14),
    "no degrees": (14, 14),
    "degrees": (14, 14),
    "no unit": (4, 2),
    "plain unit": (3, 3),
    "no currency": (3, 3),
    "leading zero": (2, 2),
    "a dot for times": (19, 18),
    "ASCII": (26, 0),
    "subscript": (5, 5),
}


def is_right(answer: str, reference: str) -> bool:
    text = f"Final Answer: The final answer is ${answer}$. I hope it is correct."
    return is_equal(answer_of(text), reference)


@pytest.fixture(scope="module")
def right_answers() -> list[str]:
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data/benchmarks")
    return [reference_of(item.answer) for item in read_items("math", str(SHARED))]


@pytest.mark.parametrize("name", HARMLESS)
def test_another_spelling_is_as_right_as_the_harness_finds_it(
    name: str, right_answers: list[str]
) -> None:
    pairs = respell(right_answers, HARMLESS[name])
    refused = [pair for pair in pairs if not is_right(pair[1], pair[0])]
    num, num_harness = ROWS[name]
    assert len(pairs) == num
    if name == "4 digits":  # of small numbers four digits are too few for 1e-4
        assert len(pairs) - len(refused) == num_harness
    else:
        assert refused == []


@pytest.mark.parametrize("name", WRONG)
def test_what_only_looks_like_an_answer_is_wrong(name: str, right_answers: list[str]) -> None:
    """The harness accepts 23 of these, open ends for closed ones most of all."""
    pairs = respell(right_answers, WRONG[name])
    assert pairs
    assert [pair for pair in pairs if is_right(pair[1], pair[0])] == []


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("18", "18.0"),
        ("$1,200", "1200"),
        ("1200 seats", "1200"),
        ("5 square metres", "5"),
        ("25%", "0.25"),
        ("25", "25\\%"),
        ("0.3333333", "1/3"),
        ("\\dfrac{1}{2}", "\\frac12"),
        ("0.5", "\\frac{1}{2}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("(2, 3)", "(2,3)"),
        ("[-2, 2]", "[-2,2]"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("June", "june"),
        ("\\text{Evelyn}", "\\text{Evelyn}"),
        ("\\sqrt12", "2\\sqrt{3}"),
        ("2.2361", "\\sqrt{5}"),
        ("62831.85", "20000\\pi"),
        ("(0.6, 2.6667]", "\\left(\\frac{3}{5},\\frac{8}{3}\\right]"),
        ("0.33333, 2", "\\frac13, 2"),
        (
            "\\begin{bmatrix} 0.3333 \\\\ \\sqrt{4} \\end{bmatrix}",
            "\\begin{pmatrix} 1/3 \\\\ 2 \\end{pmatrix}",
        ),
        ("5 m", "5"),
        ("5cm", "5"),
    ],
)
def test_equal_answers(answer: str, reference: str) -> None:
    assert is_equal(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("19", "18"),
        ("18.01", "18"),
        ("-18", "18"),
        ("", "18"),
        ("", ""),
        ("18. Then we multiply by 2", "18"),
        ("we take 18", "18"),
        ("May", "June"),
        ("\\frac{1}{3}", "\\frac{1}{2}"),
        ("x^2+2x", "(x+1)^2"),
        ("(3,2)", "(2,3)"),
        ("[-2,2)", "[-2,2]"),
        ("2k", "2"),
        ("2k", "2w"),
        ("204", "204_5"),
        ("204_5", "204"),
        ("(0.3333, 2)", "(2, 0.3333)"),
        ("0.334", "\\frac{1}{3}"),
        ("3 4", "34"),
        ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        ("5 apples and 3 pears", "5"),
    ],
)
def test_different_answers(answer: str, reference: str) -> None:
    assert not is_equal(answer, reference)


def test_a_hundredth_and_a_hundredfold_are_right_as_in_the_harness() -> None:
    assert is_equal("1200", "12")
    assert is_equal("0.12", "12")
    assert not is_equal("120", "12")


@pytest.mark.parametrize("name", ["gsm8k", "math", "svamp", "tabmwp"])
def test_a_right_answer_to_another_question_is_mostly_wrong(name: str) -> None:
    """What accepts everything would pass the test above."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data/benchmarks")
    items = read_items(name, str(SHARED))[:300]
    others = items[1:] + items[:1]
    accepted = sum(
        is_equal(reference_of(one.answer), reference_of(other.answer))
        for one, other in zip(items, others, strict=True)
    )
    assert accepted < 0.06 * len(items)
