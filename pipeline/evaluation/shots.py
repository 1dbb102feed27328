"""The worked examples before a question, and how both are put together.

Those of GSM8K and MATH are read from files that lm-eval installs, which hold the same examples; a
few bytes of MATH's differ and are mended here. Those of the sets that are answered by letter are in
math-evaluation-harness alone: from a clone of it, or else from files of our own.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml

ShotsName = Literal["gsm8k", "minerva_math", "mathqa", "mmlu_stem"]

SHA256: dict[ShotsName, str] = {
    "gsm8k": "f7b267f942be471e4ea8013cdba4c4df3cad1f969774c073e9165c568043a7b8",
    "minerva_math": "6637ad6e3ece303c059196bebdc3607ab9f617f4a57f73ac44afeb7f4320c829",
    "mathqa": "ba599b1fda1932b423e368b6a43643a10763cec1753dcdaca51375fdcd33c0cb",
    "mmlu_stem": "c5e61e1f80bbf4b08d60db5abaa55dcdc1a211093ce33e2a591ae9647bf8907a",
}
"""Of the harness's prompts/cot/NAME.md, white space around it left out."""

_OWN = {"mathqa", "mmlu_stem"}
# What the harness's file of Minerva's examples has otherwise than lm-eval's, its backslashes
# doubled; the brace after the first problem is its own.
_MINERVA_EDITS = (
    (
        r"expression  $\\frac{\\sqrt{x-2}}{\\sqrt{5-x}}$.",
        r"expression $\\frac{\\sqrt{x-2}}{\\sqrt{5-x}}$.}",
    ),
    ("non-negative. Therefore", "non-negative.\nTherefore"),
    ("$x \\\\le 5$. Also", "$x \\\\le 5$.\nAlso"),
    ("gives $x<5$. Therefore", "gives $x<5$.\nTherefore"),
    ("solve for $n$:\n", "solve for $n$: "),
    ("nonzero,\nfind", "nonzero, find"),
)


@dataclass(frozen=True)
class Shots:
    """Worked examples.

    Attributes:
        text: as they stand before a question.
        source: where they are from, for the report.
    """

    text: str
    source: str


def load_shots(name: ShotsName, prompts: Path | None = None) -> Shots:
    """Return a set's worked examples.

    Args:
        name: of the examples.
        prompts: `prompts` of a clone of math-evaluation-harness; None: lm-eval's and our own.

    Raises:
        ValueError: no such file, or lm-eval's are others than those that are known.

    Example:
        >>> load_shots("mathqa").source
        'vocag'
    """
    if prompts is not None:
        path = prompts / "cot" / f"{name}.md"
        try:
            text = path.read_text("utf-8").strip()
        except FileNotFoundError as error:
            raise ValueError(
                f"--prompts {prompts}: {path} is not there: name the folder prompts of a clone of "
                "math-evaluation-harness"
            ) from error
        same = sha256(text.encode()).hexdigest() == SHA256[name]
        return Shots(text, "math-evaluation-harness" if same else str(path))
    if name in _OWN:
        file = files("pipeline.evaluation").joinpath("shots", f"{name}.md")
        return Shots(file.read_text("utf-8").strip(), "vocag")
    text = _gsm8k() if name == "gsm8k" else _minerva()
    if sha256(text.encode()).hexdigest() != SHA256[name]:
        raise ValueError(
            f"the worked examples of {name} in the installed lm-eval are not those of "
            "math-evaluation-harness: give --prompts CLONE/prompts, or install lm-eval 0.4.13"
        )
    return Shots(text, "lm-eval, as math-evaluation-harness")


def make_prompt(shots: str, question: str, name: ShotsName) -> str:
    r"""Return what a model is asked to go on with.

    Source: `load_prompt` and `construct_prompt` of math-evaluation-harness.

    Example:
        >>> make_prompt("…", "1 + 1?", "gsm8k")
        '…\n\n\nQuestion: 1 + 1?\nAnswer:'
    """
    if name == "gsm8k":
        return f"{shots}\n\n\nQuestion: {question}\nAnswer:"
    return f"{shots}\n\n\nProblem:\n{question}\nSolution:"


def _gsm8k() -> str:
    config = yaml.safe_load(_lm_eval_file("gsm8k", "gsm8k-cot.yaml"))
    return "\n\n\n".join(
        f"Question: {shot['question']}\nAnswer: {shot['target']}"
        for shot in config["fewshot_config"]["samples"]
    )


def _minerva() -> str:
    text = "\n\n\n".join(
        f"Problem:\n{shot['problem']}\nSolution:\n{shot['solution']}" for shot in _minerva_shots()
    ).replace("\\", "\\\\")
    for found, wanted in _MINERVA_EDITS:
        text = text.replace(found, wanted)
    return text


def _minerva_shots() -> list[Mapping[str, Any]]:
    # Read, not imported: the module asks for another version of a parser than math-verify.
    tree = ast.parse(_lm_eval_file("minerva_math", "utils.py"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "list_fewshot_samples":
            (made,) = [part for part in node.body if isinstance(part, ast.Return)]
            if made.value is not None:
                return list(ast.literal_eval(made.value))
    return []


def _lm_eval_file(*parts: str) -> str:
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("lm_eval", name="lm_eval")
    return Path(spec.origin).parent.joinpath("tasks", *parts).read_text("utf-8")
