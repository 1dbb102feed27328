"""Scripted models through lm-eval and our tasks: each gets the score that it deserves."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

from lm_eval.api.metrics import bits_per_byte as lm_eval_bits_per_byte
from lm_eval.api.model import LM

from pipeline.evaluation.answers import reference_of
from pipeline.evaluation.measuring import answers_name, measure_all, plan
from pipeline.evaluation.results import Measurement, Results, read_samples
from pipeline.evaluation.set_files import read_items
from pipeline.evaluation.sets import NINE, SETS
from pipeline.evaluation.settings import Asked, StudentEngine
from tests.support.scripted_model import ScriptedModel

TINY = str(Path(__file__).parents[2] / "data" / "evaluation")
CPU = StudentEngine(device="cpu")


def measure(
    model: LM,
    folder: Path,
    sets: Sequence[str] = NINE,
    measures: Sequence[str] = ("accuracy",),
    *,
    results: Results | None = None,
    engine: StudentEngine = CPU,
    limit: int = 0,
    max_answer_tokens: int = 1024,
) -> dict[str, Measurement]:
    """Results by "set.measure"; the folder's name is the student's."""
    asked = Asked(tuple(sets), tuple(measures), TINY, limit, max_answer_tokens)
    results = results or Results(folder.name, folder.name, "0" * 64)
    steps = plan(asked)
    made = measure_all(model, results, steps, asked=asked, engine=engine, folder=folder)
    return {f"{name}.{kind}": measurement for name, kind, measurement in made}


def right_answers() -> dict[str, tuple[str, str]]:
    """The right answer of every question of the nine sets, as a model states it, and its set."""
    found = {}
    for name in NINE:
        for item in read_items(name, TINY):
            right = reference_of(item.answer)
            if SETS[name].by_letter:
                right = f"({'ABCDE'[item.label]})"
            found[item.question] = (right, name)
    return found


RIGHT = right_answers()


def asked_for(prompt: str) -> tuple[str, str]:
    """The right answer to a prompt's last question, and its set."""
    last = prompt.rpartition("\n\n\n")[2]
    return next(value for question, value in RIGHT.items() if question in last)


def state_right(prompt: str) -> str:
    right, name = asked_for(prompt)
    if name == "math":
        return f" Let us see.\nFinal Answer: The final answer is ${right}$. I hope it is correct."
    return f" Let us see.\nThe answer is {right}."


def state_wrong(prompt: str) -> str:
    right, name = asked_for(prompt)
    if SETS[name].by_letter:
        return f" The answer is ({'C' if right == '(A)' else 'A'})."
    return " The answer is 77."


def ramble_after(prompt: str) -> str:
    """The right answer, then a question of its own, as base models do."""
    more = "\n\nQuestion: What else?\nAnswer: The answer is 5."
    if prompt.endswith("Solution:"):
        more = "\n\nProblem:\nWhat else?\nSolution:\nThe answer is (E). It is $\\boxed{5}$."
    return state_right(prompt) + more


def ramble_before(prompt: str) -> str:
    """Words, and no answer; the last number is wrong."""
    return " We think of 3 things, then of 4, and again of 77 things" * 20


@pytest.mark.parametrize(
    ("answer", "accuracy", "stated"),
    [
        (state_right, 1.0, 1.0),
        (state_wrong, 0.0, 1.0),
        (lambda prompt: "", 0.0, 0.0),
        (ramble_after, 1.0, 1.0),
        (ramble_before, 0.0, 0.0),
    ],
    ids=["right", "wrong", "empty", "rambles after", "rambles before"],
)
def test_a_scripted_model_gets_what_it_deserves(
    answer: Callable[[str], str], accuracy: float, stated: float, tmp_path: Path
) -> None:
    model = ScriptedModel(answer)
    made = measure(model, tmp_path)
    assert len(model.asked) == len(RIGHT) == 20
    got = {
        name: (one.values["accuracy"].value, one.values["stated"].value)
        for name, one in made.items()
    }
    assert got == {f"{name}.accuracy": (accuracy, stated) for name in NINE}


def test_what_follows_the_answer_on_its_line_is_part_of_it(tmp_path: Path) -> None:
    """The harness's rule, which costs a model that goes on; a letter is found all the same."""
    made = measure(ScriptedModel(lambda prompt: state_right(prompt) + " And so on"), tmp_path)
    values = {name.partition(".")[0]: one.values["accuracy"].value for name, one in made.items()}
    # MATH's "$. I hope it is correct" ends its answer.
    wrong = {"gsm8k", "svamp", "asdiv", "mawps", "tabmwp"}
    assert values == {name: float(name not in wrong) for name in NINE}


def test_wrong_answers_are_kept_to_be_read(tmp_path: Path) -> None:
    measure(ScriptedModel(state_wrong), tmp_path, ["tabmwp"])
    first, second = read_samples(tmp_path, "tabmwp", "accuracy")
    assert (first["right"], first["said"], first["accuracy"]) == ("1,004", "77", 0.0)
    assert first["text"] == " The answer is 77."
    assert second["question"].endswith("from the following options: ['May', 'June']")


def test_bits_per_byte_are_by_the_byte_that_is_scored(tmp_path: Path) -> None:
    model = ScriptedModel(nats_per_byte=lambda context, text: 2 * math.log(2))
    made = measure(model, tmp_path, NINE, ("text", "solution", "answer", "options"))
    measured = {name: one.values["bits_per_byte"] for name, one in made.items()}
    assert {round(value.value, 9) for value in measured.values()} == {2.0}
    assert {name for name in measured if name.endswith("solution")} == {
        f"{name}.solution" for name in ("gsm8k", "math", "tabmwp", "mathqa")
    }
    assert {name for name in measured if name.endswith("options")} == {
        f"{name}.options" for name in ("tabmwp", "mathqa", "mmlu_stem", "sat_math")
    }
    assert "math.answer" not in measured


def test_bits_per_byte_are_lm_evals_own(tmp_path: Path) -> None:
    """Items of different length and difficulty: the sums decide, not the mean of ratios."""
    model = ScriptedModel(nats_per_byte=lambda context, text: 0.1 + len(text) % 7)
    made = measure(model, tmp_path, ["gsm8k"], ["solution"])
    pairs = [sample["bits_per_byte"] for sample in read_samples(tmp_path, "gsm8k", "solution")]
    assert len({nats / length for nats, length in pairs}) > 1
    value = made["gsm8k.solution"].values["bits_per_byte"].value
    assert value == pytest.approx(lm_eval_bits_per_byte(pairs), abs=1e-12)


def test_choice_by_likelihood_is_by_what_the_problem_adds(tmp_path: Path) -> None:
    rights = {
        item.options[item.label] for name in NINE for item in read_items(name, TINY) if item.options
    }

    def nats(context: str, text: str) -> float:
        # Unlikely by itself, likelier under its problem than any other is under its own.
        return (1.0 if context else 9.0) if text.strip() in rights else (0.5 if context else 0.6)

    made = measure(ScriptedModel(nats_per_byte=nats), tmp_path, NINE, ["options"])
    assert {one.values["accuracy"].value for one in made.values()} == {1.0}
    assert made["mathqa.options"].values["chance"].value == 0.2
    assert made["tabmwp.options"].values["chance"].value == 0.5


def test_limits_spread_over_a_set(tmp_path: Path) -> None:
    model = ScriptedModel(state_right)
    made = measure(model, tmp_path, ["gsm8k"], limit=2)
    assert made["gsm8k.accuracy"].num_items == len(model.asked) == 2
    places = [sample["place"] for sample in read_samples(tmp_path, "gsm8k", "accuracy")]
    assert places == [0, 1]  # of three


def test_a_run_that_was_killed_continues_and_asks_nothing_twice(tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts" / "one", tmp_path / "whole" / "one"
    left = []

    def die_at_the_eighth(prompt: str) -> str:
        if len(model.asked) == 8:
            left.extend(path.read_bytes() for path in parts.glob("answers-*.jsonl"))
            raise KeyboardInterrupt
        return state_right(prompt)

    model = ScriptedModel(die_at_the_eighth)
    with pytest.raises(KeyboardInterrupt):
        measure(model, parts)
    (answers,) = left
    assert len(answers.splitlines()) == 7, "each was on disk before the next was asked for"
    # A line that the kill cut through is not believed.
    next(parts.glob("answers-*.jsonl")).write_bytes(answers + b'{"key": "8c1f", "ans')
    again = ScriptedModel(state_right)
    assert measure(again, parts) == measure(ScriptedModel(state_right), whole)
    assert len(again.asked) == 13
    assert (parts / "results.json").read_bytes() == (whole / "results.json").read_bytes()


def test_other_students_or_settings_have_other_answers() -> None:
    engines = (
        StudentEngine(device="cpu"),
        StudentEngine(device="cpu", dtype="bfloat16"),
        StudentEngine(device="cuda:1"),
    )
    names = {answers_name(digit * 64, engine) for digit in "12" for engine in engines}
    assert len(names) == 6
    assert answers_name("1" * 64, StudentEngine(device="cuda")) in names
