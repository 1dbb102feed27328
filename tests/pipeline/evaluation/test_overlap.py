"""Contamination: a question in the training text is found, and nothing else is."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_jobs.remove.command import main as remove
from pipeline.command_line.folder_lock import hold_folder
from pipeline.dataset.texts import read_texts
from pipeline.evaluation.overlap import (
    NUM_WORDS,
    Questions,
    _read_all,
    parts_of,
    split_words,
)
from pipeline.evaluation.overlap_command import OUTPUT_LOCK, main
from pipeline.evaluation.set_files import read_items
from pipeline.evaluation.sets import SETS, Item, math_500
from pipeline.evaluation.students import find_student
from tests.support.datasets import build_dataset, make_texts, remove_documents, word_pieces
from tests.support.hf_folders import write_model

TINY = str(Path(__file__).parents[2] / "data" / "evaluation")
WORDS = st.lists(st.sampled_from(["a", "b", "c", "1"]), max_size=40)


@given(question=WORDS, text=WORDS)
def test_what_is_found_is_what_a_slow_search_finds(
    question: Sequence[str], text: Sequence[str]
) -> None:
    joined = f" {' '.join(text)} "
    sequences = [question[i : i + NUM_WORDS] for i in range(len(question) - NUM_WORDS + 1)]
    telling = [sequence for sequence in sequences if {"a", "b", "c"} <= set(sequence)]
    expected = any(f" {' '.join(sequence)} " in joined for sequence in telling)
    assert (
        bool(Questions([("math", 0, {"problem": " ".join(question)})]).find(" ".join(text)))
        == expected
    )


def test_spacing_case_and_punctuation_hide_nothing() -> None:
    item = read_items("gsm8k", TINY)[0]
    questions = Questions([("gsm8k", 0, {"problem": item.problem})])
    text = "Exercise 7.\n" + "  ".join(split_words(item.problem)).upper() + "\n\nSolution"
    assert [found.place for found in questions.find(text)] == [0]
    assert questions.find(text.replace("ROLLS", "BUNS")) == []


@pytest.mark.parametrize(
    "text",
    ["Which of these is a prime number?", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 or 14?"],
)
def test_what_any_text_may_hold_is_counted_not_found(text: str) -> None:
    """Too few words, or a run of numbers as in tables and programs."""
    questions = Questions([("mmlu_stem", 0, {"problem": text})])
    assert questions.num_hidden == {"mmlu_stem": 1}
    assert questions.find(text) == []


@pytest.mark.parametrize("keep_text", [True, False])
def test_a_dataset_with_test_questions_is_found_out(
    keep_text: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    item = read_items("gsm8k", TINY)[2]
    texts = [*make_texts(12), ("forum/7", f"Homework: {item.problem.lower()} Please help.")]
    build_dataset(tmp_path / "aligned", texts, keep_text=keep_text)
    command = [str(tmp_path / "aligned"), "--data", TINY]
    assert main([*command, "--output", str(tmp_path / "overlap")]) == 0
    (line,) = (tmp_path / "overlap" / "overlap.jsonl").read_text("utf-8").splitlines()
    found = json.loads(line)
    assert (found["document_id"], found["set"], found["place"]) == ("forum/7", "gsm8k", 2)
    assert len(found["words"].split()) == NUM_WORDS
    text = capsys.readouterr().out
    assert "1 of 13 documents hold one" in text
    (hint,) = [line for line in text.splitlines() if "vocag remove" in line]
    assert remove(shlex.split(hint.partition("vocag remove ")[2])) == 0
    assert main([*command, "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "overlap.jsonl").read_text("utf-8") == ""
    assert "0 of 12 documents hold one" in capsys.readouterr().out


def test_a_dataset_without_documents_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = make_texts(6)
    build_dataset(tmp_path / "aligned", texts)
    remove_documents(tmp_path / "aligned", *(name for name, _ in texts))
    command = [str(tmp_path / "aligned"), "--data", TINY, "--output", str(tmp_path / "overlap")]
    assert main(command) == 2
    assert "all are removed" in capsys.readouterr().err
    with pytest.raises(ValueError, match="all are removed"):
        next(read_texts([str(tmp_path / "aligned")]))


def test_two_at_once_write_no_list_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_dataset(tmp_path / "data")
    arguments = [str(tmp_path / "data"), "--data", TINY, "--output", str(tmp_path / "overlap")]
    with hold_folder(str(tmp_path / "overlap" / OUTPUT_LOCK), "overlap"):
        assert main([*arguments, "--tasks", "gsm8k"]) == 2
    assert "writes to" in capsys.readouterr().err
    assert main([*arguments, "--tasks", "gsm8k"]) == 0
    assert [path.name for path in (tmp_path / "overlap").iterdir()] == ["overlap.jsonl"]


def test_documents_without_a_text_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = {"student": word_pieces(), "teacher": word_pieces()}
    build_dataset(tmp_path / "aligned", make_texts(3), keep_text=False, **sides)
    command = [str(tmp_path / "aligned"), "--data", TINY, "--output", str(tmp_path)]
    assert main(command) == 0
    assert "not searched: 3 of 3 documents" in capsys.readouterr().out


LONG = "which of the following numbers is the smallest prime above one hundred"
SOLVED = "we try each odd number in turn and see that one hundred and one has no divisor"
ITEM = Item(
    question=LONG,
    problem=LONG,
    answer="101",
    solution=SOLVED,
    options=("101", "103", "105", "107"),
    label=0,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"Solution. {SOLVED.capitalize()}.", ["solution"]),
        (f"Q7: {LONG}? A. 101 B. 103 C. 105 D. 107", ["options"]),
        (f"Q7: {LONG}?", []),
        ("A. 101 B. 103 C. 105 D. 107", []),
    ],
)
def test_solutions_and_options_are_found_too(text: str, parts: list[str]) -> None:
    """The problem alone has 12 words."""
    questions = Questions([("mathqa", 3, parts_of(ITEM))])
    assert questions.num_hidden == {}
    assert [(found.place, found.part) for found in questions.find(text)] == [
        (3, part) for part in parts
    ]


def test_all_of_math_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only the 500 that are evaluated, where the whole file is there."""
    rows = [
        {"problem": f"number {place} of many", "solution": f"{LONG} {place} \\boxed{{{place}}}"}
        for place in range(5000)
    ]
    data = tmp_path / "data"
    data.mkdir()
    (data / "math.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    other = next(place for place in range(5000) if place not in math_500())
    build_dataset(tmp_path / "aligned", [*make_texts(3), ("x", rows[other]["solution"])])
    command = [str(tmp_path / "aligned"), "--tasks", "math"]
    assert main([*command, "--data", str(data), "--output", str(tmp_path)]) == 0
    (line,) = (tmp_path / "overlap.jsonl").read_text("utf-8").splitlines()
    found = json.loads(line)
    assert (found["set"], found["place"], found["part"]) == ("math_full", other, "solution")
    assert "MATH (5,000)" in capsys.readouterr().out


def test_every_message_of_a_chat_is_searched() -> None:
    written = SOLVED.replace(" number ", ' number\n"').replace(" one ", "\n\tone ")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": written}]
    item = SETS["chats"].make({"messages": messages})
    (found,) = Questions([("chats", 0, parts_of(item))]).find(f"So {SOLVED.upper()}.")
    assert found.part == "message 1"
    item = SETS["chats"].make({"messages": messages[1:]})
    (found,) = Questions([("chats", 0, parts_of(item))]).find(SOLVED)
    assert found.part == "message 0"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("svamp", "\n", "svamp.jsonl: it holds no item: write one a line"),
        ("gsm8k", '{"question": "a", "answer": "#### 1"}\n\n{"question', "line 3 isn't JSON"),
        ("gsm8k", '{"question": "a", "answer": "1"}', "item 1 isn't in math-evaluation-harness's"),
        ("math", '{"problem', "math.jsonl: line 1 isn't JSON"),
        ("mmlu_stem", '{"question": "a", "choices": ["1", ""], "answer": 0}', "item 1 isn't in"),
        ("mmlu_stem", '{"question": "a", "choices": ["1", "2"], "answer": -1}', "answer -1 of opt"),
        ("mawps", '{"input": "\\ud800", "target": 1}', "item 1 isn't in .*surrogates not allowed"),
        ("chats", '["Why?"]', 'item 1 isn\'t of the form {"messages": …}'),
    ],
)
def test_a_sets_damaged_file_is_named(tmp_path: Path, name: str, content: str, told: str) -> None:
    """Also of MATH, of which a smaller file may be there."""
    (tmp_path / f"{name}.jsonl").write_text(content, "utf-8")
    (tmp_path / "math500.jsonl").write_text('{"problem": "a", "solution": "\\\\boxed{1}"}')
    build_dataset(tmp_path / "aligned", make_texts(2))
    command = [str(tmp_path / "aligned"), "--tasks", name, "--data", str(tmp_path)]
    with pytest.raises(ValueError, match=told):
        dict([_read_all(name, str(tmp_path))])
    assert main([*command, "--output", str(tmp_path / "found")]) == 2


def test_the_name_of_a_student_is_a_folders(tmp_path: Path) -> None:
    folder = tmp_path / "seed=1"
    write_model(folder, word_pieces(40))
    assert find_student(str(folder)).name == "seed_1"
    assert find_student(f"own={folder}").name == "own"
    for name in ("", "..", "../x"):
        with pytest.raises(ValueError, match=f"\"{name}\" can't be a folder's name"):
            find_student(f"{name}={folder}")
