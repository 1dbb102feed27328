"""The paper's nine evaluation sets as one kind of item.

Questions have math-evaluation-harness's wording, oddities included: a byte in a prompt changes a
small model's answer. The worked examples (`shots/`) are its files (commit db77bc6).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pipeline.chats.messages import Chat, read_chat

Row = Mapping[str, Any]
ShotsName = Literal["gsm8k", "minerva_math", "mathqa", "mmlu_stem"]

_CHOOSE = "What of the following is the right choice? Explain your answer."
_LETTERS = "ABCDE"
_HARNESS_FORM = "in math-evaluation-harness's format"
_HINTS = {"yes": " (Yes or No)", "no": " (Yes or No)"}
_HINTS |= dict.fromkeys(("true", "false"), " (True or False)")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question with its answer.

    Attributes:
        question: as in a prompt, with options and hints.
        problem: without them.
        answer: in words or numbers; MATH's whole solution.
        solution: worked, if the set has one.
        options: texts; empty for a free answer.
        label: the right option's place, or -1.
        chat: JSON of a conversation's fields, or ""; `chat_of` reads it.
    """

    question: str
    problem: str
    answer: str
    solution: str = ""
    options: tuple[str, ...] = ()
    label: int = -1
    chat: str = ""


@dataclass(frozen=True)
class EvaluationSet:
    """One of the nine, or a user's: data in `file`.jsonl, worked examples in `shots`."""

    title: str
    file: str
    make: Callable[[Row], Item]
    shots: ShotsName

    @property
    def by_letter(self) -> bool:
        """Whether an answer is an option's letter."""
        return self.shots in ("mathqa", "mmlu_stem")


def make_items(name: str, rows: Sequence[Row], *, whole: bool) -> list[Item]:
    """Return the items of a set's lines; of MATH's 5,000 the 500, unless `whole`.

    Raises:
        ValueError: a malformed line; too few lines to find MATH's 500.
    """
    if name == "math" and not whole:
        places = math_500()
        if len(rows) <= places[-1]:
            raise ValueError(
                f"math: the file has {len(rows)} lines, but MATH's test set has 5,000, and "
                "the 500 are taken by place: if these are the 500, name the file math500.jsonl"
            )
        rows = [rows[place] for place in places]
    items = []
    for number, row in enumerate(rows, 1):
        try:
            item = SETS[name].make(row)
            f"{item.question}{item.answer}{item.solution}".encode()  # models take Unicode alone
            items.append(item)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            form = 'of the form {"messages": …}' if name == CHATS else _HARNESS_FORM
            raise ValueError(
                f"{name}: item {number} isn't {form} ({error!r}): see docs/guides/evaluate.md"
            ) from error
    return items


def chat_of(item: Item) -> Chat:
    """Read an item's conversation; ChatError if it is invalid."""
    row = json.loads(item.chat)
    return read_chat(row["messages"], row["tools"])


@cache
def math_500() -> tuple[int, ...]:
    """Return the places of MATH's 500 test items that PRM800K kept for testing."""
    text = files("pipeline.evaluation").joinpath("math500.txt").read_text("utf-8")
    return tuple(map(int, text.split()))


@cache
def load_shots(name: ShotsName) -> str:
    """Return a set's worked examples."""
    file = files("pipeline.evaluation").joinpath("shots", f"{name}.md")
    return file.read_text("utf-8").strip()


def make_prompt(question: str, name: ShotsName) -> str:
    """Return the prompt for a model to continue.

    Source: `load_prompt` and `construct_prompt` of math-evaluation-harness.
    """
    if name == "gsm8k":
        return f"{load_shots(name)}\n\n\nQuestion: {question}\nAnswer:"
    return f"{load_shots(name)}\n\n\nProblem:\n{question}\nSolution:"


def _gsm8k(row: Row) -> Item:
    solution, answer = row["answer"].split("####")
    # <<48/2=24>> are a calculator's annotations, no text that anyone would write.
    solution = re.sub(r"<<.*?>>", "", solution).strip()
    return _open(row["question"], answer.strip(), solution=solution)


def _math(row: Row) -> Item:
    return _open(row["problem"], row["solution"], solution=row["solution"])


def _svamp(row: Row) -> Item:
    body = row["Body"].strip()
    body += "" if body.endswith(".") else "."
    return _open(f"{body} {row['Question'].strip()}", _number(row["Answer"]))


def _asdiv(row: Row) -> Item:
    answer = re.sub(r"\(.*?\)", "", row["answer"]).strip()
    problem = f"{row['body'].strip()} {row['question'].strip()}"
    return _open(problem, answer, hint=_HINTS.get(answer.lower(), ""))


def _mawps(row: Row) -> Item:
    return _open(row["input"], _number(row["target"]))


def _tabmwp(row: Row) -> Item:
    title = f'regarding "{row["table_title"]}" ' if row["table_title"] else ""
    problem = f"Read the following table {title}and answer a question:\n{row['table']}\n"
    problem += row["question"]
    options, answer = row["choices"] or [], row["answer"]
    hint = f" Please select from the following options: {options}" if options else ""
    hint += _HINTS.get(answer.lower(), "")
    item = _open(problem, answer, solution=row["solution"], hint=hint)
    return replace(item, options=tuple(options), label=options.index(answer) if options else -1)


def _mathqa(row: Row) -> Item:
    problem = row["problem"].strip()
    # An "answer : a" at the end isn't part of the reasoning.
    solution = re.sub(r"\s*answer\s*[:;=]?\s*\(?[a-e]\)?\W*$", "", row["rationale"].strip(' "'))
    item = _choice(
        problem[0].upper() + problem[1:],
        _mathqa_options(row["options"]),
        "abcde".index(row["correct"]),
    )
    stem, _, listed = item.question.rpartition("\n")
    return replace(item, solution=solution, question=f"{stem}\n{listed.replace(' , ', ', ')}")


def _mmlu_stem(row: Row) -> Item:
    return _choice(row["question"], [str(option) for option in row["choices"]], row["answer"])


def _sat_math(row: Row) -> Item:
    text = row["options"].strip()
    options = re.split(r"(?:^|\s)[A-D][).] ", text)[1:]
    item = _choice(row["question"], options, "ABCD".index(row["Answer"]))
    # Without commas; four of the 32 are spelt "A. …" and stay so.
    listed = "(" + re.sub(r" ([B-D])\) ", r" (\1) ", text)
    return replace(item, question=f"{item.problem}\n{_CHOOSE}\n{listed}")


def _chat(row: Row) -> Item:
    # An unusable conversation is left out when it is read, not here: the others count.
    chat = {"messages": row.get("messages"), "tools": row.get("tools")}
    return Item(question="", problem="", answer="", chat=json.dumps(chat))


def _open(problem: str, answer: str, *, solution: str = "", hint: str = "") -> Item:
    # Two questions of TabMWP end with a space, which the harness leaves before its hint.
    question = f"{problem}{hint}".strip()
    return Item(question=question, problem=problem.strip(), answer=answer, solution=solution)


def _choice(problem: str, options: Sequence[str], label: int) -> Item:
    problem, options = problem.strip(), tuple(option.strip() for option in options)
    if not all(options) or not 0 <= label < len(options) <= len(_LETTERS):
        raise ValueError(f"answer {label} of options {options}")
    pairs = zip(_LETTERS, options, strict=False)
    listed = ", ".join(f"({letter}) {text}" for letter, text in pairs)
    question = f"{problem}\n{_CHOOSE}\n{listed}"
    answer = options[label]
    return Item(question=question, problem=problem, answer=answer, options=options, label=label)


def _mathqa_options(text: str) -> list[str]:
    text = text.strip()
    if text.startswith("["):  # 16 of 1,000 are spelt as a Python list
        text = ", ".join(
            part.strip("\"'") for part in re.split(r"(?<=['\"]), (?=['\"])", text[1:-1])
        )
    # "a ) a ) 12" occurs, too
    text = re.sub(r"([a-e]) \) \1 \) ", r"\1 ) ", text)
    parts = re.split(r"(?:^|[, ]\s*)([a-e]) \) ?", text)
    return [part.strip(" ,") for part in parts[2::2]]


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


SETS: dict[str, EvaluationSet] = {
    made.file: made
    for made in (
        EvaluationSet("GSM8K", "gsm8k", _gsm8k, "gsm8k"),
        EvaluationSet("MATH-500", "math", _math, "minerva_math"),
        EvaluationSet("SVAMP", "svamp", _svamp, "gsm8k"),
        EvaluationSet("ASDiv", "asdiv", _asdiv, "gsm8k"),
        EvaluationSet("MAWPS", "mawps", _mawps, "gsm8k"),
        EvaluationSet("TabMWP", "tabmwp", _tabmwp, "gsm8k"),
        EvaluationSet("MathQA", "mathqa", _mathqa, "mathqa"),
        EvaluationSet("MMLU-STEM", "mmlu_stem", _mmlu_stem, "mmlu_stem"),
        EvaluationSet("SAT", "sat_math", _sat_math, "mmlu_stem"),
    )
}
NINE = tuple(SETS)
"""In the paper's order."""

SETS["math_full"] = replace(SETS["math"], title="MATH (5,000)")

CHATS = "chats"
SETS[CHATS] = EvaluationSet("conversations", CHATS, _chat, "gsm8k")
"""A user's own: `{"messages": …}` in each line."""
