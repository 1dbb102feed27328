"""Which part of a text is its answer, and whether it is right."""

import pytest

pytest.importorskip("math_verify", reason="needs vocag[evaluate]")

from pathlib import Path

from pipeline.evaluation.answers import answer_of, chosen_letter, reference_of, score
from pipeline.evaluation.set_files import read_items
from pipeline.evaluation.sets import CHATS, SETS, Item

SHARED = Path(__file__).parents[4] / "shared" / "data" / "benchmarks"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So the answer is 18.", "18"),
        ("The answer is 4. No: the answer is 5.", "5"),
        ("The answer is: 7", "7"),
        ("Final Answer: The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}"),
        ("It is $\\boxed{\\frac{\\sqrt{2}}{3}}$, done.", "\\frac{\\sqrt{2}}{3}"),
        ("First \\boxed{1}, then \\boxed{2}.", "2"),
        ("That makes 3 and 1,250 in all", "1250"),
        ("The answer is\n  12\n", "12"),
        ("The answer is **70,000**.", "70,000"),
        ("**The answer is 5.**", "5"),
        ("The final answer is: **12** dollars", "12 dollars"),
        ("The answer is \\(70,000\\).", "70,000"),
        ("The answer is $2**3$", "$2**3$"),
        (
            "\\[ \\boxed{\\begin{pmatrix} 1 \\\\[2pt] 2 \\end{pmatrix}} \\]",
            "\\begin{pmatrix} 1 \\\\[2pt] 2 \\end{pmatrix}",
        ),
        ("nothing at all", ""),
        ("", ""),
        ("The answer is \\boxed{", ""),
    ],
)
def test_the_answer_of_a_text(text: str, answer: str) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Final Answer: The final answer is (B).", "B"),
        ("the choice is d", "D"),
        ("The answer is **(B)**.", "B"),
        ("the answer is (A). No, the answer is (C).", "A"),
        ("Problem:\nThe answer is (A).", ""),
        ("the answer is 24", ""),
        ("B", ""),
    ],
)
def test_the_letter_of_a_text(text: str, letter: str) -> None:
    assert chosen_letter(text) == letter


def written(item: Item, *, by_letter: bool, is_math: bool) -> str:
    """An item's right answer as the worked examples write theirs."""
    if by_letter:
        return f"We think.\nFinal Answer: The final answer is ({'ABCDE'[item.label]})."
    if is_math:
        right = reference_of(item.answer)
        return f"We think.\nFinal Answer: The final answer is ${right}$. I hope it is correct."
    return f"We think. The answer is {item.answer}."


@pytest.mark.parametrize("name", sorted({*SETS} - {CHATS}))
def test_every_right_answer_is_accepted(name: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data/benchmarks")
    items = read_items(name, str(SHARED))
    by_letter, is_math = SETS[name].by_letter, SETS[name].file == "math"
    refused = []
    for place, item in enumerate(items):
        document = {"by_letter": by_letter, "label": item.label, "answer": item.answer}
        text = written(item, by_letter=by_letter, is_math=is_math)
        if score(document, [text]) != {"accuracy": 1.0, "stated": 1.0}:
            refused.append((place, text))
    assert len(items) >= 32
    assert refused == []
