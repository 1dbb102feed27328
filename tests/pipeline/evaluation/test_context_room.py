"""What a student's context holds is known beforehand, and said."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

from pipeline.evaluation.context_room import find_room
from pipeline.evaluation.lm_tasks import load_task
from tests.pipeline.evaluation.test_measures import TINY, measure, state_right
from tests.support.scripted_model import ScriptedModel


def longest_prompt() -> int:
    task = load_task("gsm8k", "accuracy", TINY)
    task.build_all_requests()
    return max(len(instance.args[0].split()) for instance in task.instances)


def test_answers_get_the_room_that_the_longest_prompt_leaves(tmp_path: Path) -> None:
    model = ScriptedModel(state_right, max_length=longest_prompt() + 100)
    made = measure(model, tmp_path, ["gsm8k"])["gsm8k.accuracy"]
    assert made.answer_tokens == 100
    assert "answers of at most 100 tokens, not 1024" in made.note
    assert made.values["accuracy"].value == 1.0


def test_an_answer_is_not_longer_than_asked_for(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: " so" * 50 + state_right(prompt))
    made = measure(model, tmp_path, ["gsm8k"], max_answer_tokens=50)["gsm8k.accuracy"]
    assert (made.answer_tokens, made.note, made.values["accuracy"].value) == (50, "", 0.0)


def test_a_context_without_room_is_refused_by_name(tmp_path: Path) -> None:
    model = ScriptedModel(state_right, max_length=longest_prompt() + 63)
    made = measure(model, tmp_path, ["gsm8k"])["gsm8k.accuracy"]
    assert model.asked == []
    assert (made.num_items, made.num_left_out, dict(made.values)) == (0, 3, {})
    assert "leaves 63 for an answer, 64 are the least" in made.note


def test_texts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    task = load_task("gsm8k", "solution", TINY)
    task.build_all_requests()
    lengths = sorted(len("".join(instance.args).split()) for instance in task.instances)
    model = ScriptedModel(max_length=lengths[1] + 1)
    room = find_room(task, model, 1024)
    assert (len(room.documents), room.num_left_out) == (2, 1)
    made = measure(model, tmp_path, ["gsm8k"], ["solution", "text"])
    assert made["gsm8k.text"].num_items == 2
    assert made["gsm8k.solution"].num_items == 2
    assert "1 of 3 items are longer than its context" in made["gsm8k.solution"].note
