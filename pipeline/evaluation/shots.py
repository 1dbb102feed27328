"""The worked examples before a question, and how both are put together.

The files in `shots/` are math-evaluation-harness's own (commit db77bc6), which come with its
licence.
"""

from functools import cache
from importlib.resources import files
from typing import Literal

ShotsName = Literal["gsm8k", "minerva_math", "mathqa", "mmlu_stem"]


@cache
def load_shots(name: ShotsName) -> str:
    """Return a set's worked examples.

    Example:
        >>> load_shots("gsm8k").count("The answer is")
        8
    """
    file = files("pipeline.evaluation").joinpath("shots", f"{name}.md")
    return file.read_text("utf-8").strip()


def make_prompt(question: str, name: ShotsName) -> str:
    r"""Return what a model is asked to continue.

    Source: `load_prompt` and `construct_prompt` of math-evaluation-harness.

    Example:
        >>> make_prompt("1 + 1?", "gsm8k").rpartition("\n\n\n")[2]
        'Question: 1 + 1?\nAnswer:'
    """
    if name == "gsm8k":
        return f"{load_shots(name)}\n\n\nQuestion: {question}\nAnswer:"
    return f"{load_shots(name)}\n\n\nProblem:\n{question}\nSolution:"
