"""Prompts: byte for byte the harness's, or our own and said to be."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

from pipeline.evaluation.data import read_items
from pipeline.evaluation.sets import NINE, SETS, math_500
from pipeline.evaluation.shots import SHA256, ShotsName, load_shots, make_prompt

TINY = Path(__file__).parents[2] / "data" / "evaluation"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "benchmarks"

# The harness's own functions; word2number, which its answers need, is not what is tested.
HARNESS = """
import hashlib, json, sys, types
numbers = types.ModuleType("word2number.w2n")
sys.modules["word2number"] = types.ModuleType("word2number")
sys.modules["word2number"].w2n = sys.modules["word2number.w2n"] = numbers
sys.path.insert(0, ".")
from parser import parse_question
from utils import construct_prompt
arguments = types.SimpleNamespace(prompt_type="cot")
for line in sys.stdin:
    name, row = json.loads(line)
    row["question"] = parse_question(row, name)
    prompt = construct_prompt(row, name, arguments)
    print(hashlib.sha256(prompt.encode()).hexdigest())
"""


@pytest.mark.parametrize("name", ["gsm8k", "minerva_math"])
def test_the_installed_examples_are_the_harnesss(name: ShotsName) -> None:
    shots = load_shots(name)
    assert hashlib.sha256(shots.text.encode()).hexdigest() == SHA256[name]
    assert shots.source == "lm-eval, as math-evaluation-harness"


@pytest.mark.parametrize(("name", "letters"), [("mathqa", "ABCDE"), ("mmlu_stem", "ABCD")])
def test_our_own_examples_are_complete_and_said_to_be_ours(name: ShotsName, letters: str) -> None:
    shots = load_shots(name)
    assert shots.source == "vocag"
    parts = shots.text.split("\n\n\n")
    assert len(parts) == 4
    for part in parts:
        listed = re.search(r"Explain your answer\.\n(.*)\nSolution:\n", part)
        assert listed is not None
        options = re.split(r"(?:^|, )\(([A-E])\) ", listed[1])
        assert "".join(options[1::2]) == letters
        answer = re.search(r"Final Answer: The final answer is \(([A-E])\)\.$", part)
        assert answer is not None
        assert answer[1] in letters


def test_a_clones_examples_are_taken_and_named(tmp_path: Path) -> None:
    (tmp_path / "cot").mkdir()
    (tmp_path / "cot" / "mathqa.md").write_text("Problem:\nmine\n")
    shots = load_shots("mathqa", tmp_path)
    assert (shots.text, shots.source) == ("Problem:\nmine", str(tmp_path / "cot" / "mathqa.md"))
    with pytest.raises(ValueError, match="the folder prompts of a clone"):
        load_shots("gsm8k", tmp_path)


def test_every_question_follows_the_examples_of_its_set() -> None:
    for name in NINE:
        shots_name = SETS[name].shots
        text = load_shots(shots_name).text
        for item in read_items(name, str(TINY)):
            prompt = make_prompt(text, item.question, shots_name)
            head, _, question = prompt.rpartition("\n\n\n")
            assert head == text
            start = "Question: " if shots_name == "gsm8k" else "Problem:\n"
            assert question.startswith(start + item.question)


@pytest.mark.parametrize("name", NINE)
def test_prompts_equal_the_harnesss_byte_for_byte(name: str) -> None:
    clone = os.environ.get("VOCAG_TEST_MATH_HARNESS")
    if not clone:
        pytest.skip("no clone of math-evaluation-harness: VOCAG_TEST_MATH_HARNESS=CLONE")
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data/benchmarks")
    file = SHARED / f"{SETS[name].file}.jsonl"
    rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
    if name == "math":
        rows = [rows[place] for place in math_500()]
    harness_name = {"math": "minerva_math"}.get(name, name)
    lines = "".join(json.dumps([harness_name, row]) + "\n" for row in rows)
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HARNESS],
        cwd=clone,
        input=lines,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    shots_name = SETS[name].shots
    # GSM8K's and MATH's come from lm-eval here: the claim to be proven.
    prompts = Path(clone, "prompts") if shots_name in ("mathqa", "mmlu_stem") else None
    text = load_shots(shots_name, prompts).text
    ours = [
        hashlib.sha256(make_prompt(text, item.question, shots_name).encode()).hexdigest()
        for item in read_items(name, str(SHARED))
    ]
    theirs = asked.stdout.split()
    assert len(theirs) == len(rows)
    assert [place for place in range(len(rows)) if ours[place] != theirs[place]] == []
