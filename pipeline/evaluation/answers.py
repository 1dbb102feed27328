r"""Extract the answer from a model's text, and judge it.

As in math-evaluation-harness, but any unit of one or two words ("5 dollars") and chat models'
markup (`**5**`, `\(5\)`) are forgiven; other text after an answer isn't.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.evaluation.equality import is_equal

_CHOICE = re.compile(r"answer is \(?([a-e])\)?")
_MARKUP = re.compile(r"(?<![^\s(])\*\*|\*\*(?=[\s.,;:!?)]|$)|(?<!\\)\\[()\[\]]")
"""Bold at the edge of a word, unlike a power's `2**3`, and brackets of mathematics."""
_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")


def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score a model's text for lm-eval: `accuracy`, and whether an answer is `stated`."""
    text = results[0].strip()
    if document["by_letter"]:
        found = chosen_letter(text)
        right = found == "ABCDE"[document["label"]]
        return {"accuracy": float(right), "stated": float(bool(found))}
    right = is_equal(answer_of(text), reference_of(document["answer"]))
    stated = any(words in text for words in ("he answer is", "final answer is", "boxed"))
    return {"accuracy": float(right), "stated": float(stated)}


def chosen_letter(text: str) -> str:
    """Return the letter of the first "answer is (X)", or "".

    Source: `extract_multi_choice_answer` of math-evaluation-harness.
    """
    text = _MARKUP.sub("", text).split("Problem:", 1)[0].replace("choice is", "answer is")
    found = _CHOICE.search(text.lower())
    return found[1].upper() if found else ""


def answer_of(text: str) -> str:
    """Return the answer that a text states, else its last number, or "".

    Source: `extract_answer` of math-evaluation-harness.
    """
    text = _MARKUP.sub("", text)
    if "final answer is $" in text and "$. I hope" in text:
        found = text.split("final answer is $", 1)[1].split("$. I hope", 1)[0]
    elif "boxed" in text:
        found = _boxed(text)
    elif "he answer is" in text:
        found = text.rpartition("he answer is")[2]
    elif "final answer is" in text:
        found = text.rpartition("final answer is")[2]
    else:
        numbers = _LAST_NUMBER.findall(text.replace(",", ""))
        found = numbers[-1] if numbers else ""
    return _tidy(found)


def reference_of(answer: str) -> str:
    """Return an item's boxed answer, or all of it."""
    return _tidy(_boxed(answer) if "boxed" in answer else answer)


def _boxed(text: str) -> str:
    rest, depth, inside = text.rpartition("boxed")[2], 0, ""
    if not rest.startswith("{"):
        return rest.split("$")[0]
    for character in rest:
        depth += (character == "{") - (character == "}")
        if depth == 0:
            break
        inside += character
    return inside[1:]


def _tidy(text: str) -> str:
    text = re.sub(r"\n\s*", "", text.strip()).removeprefix(":").strip()
    return text.removesuffix(".").removesuffix("/").strip().rstrip(".")
