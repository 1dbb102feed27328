"""Prompts: byte for byte the harness's."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

from pipeline.evaluation.data import read_items
from pipeline.evaluation.sets import NINE, SETS, ShotsName, load_shots, make_prompt, math_500

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


SHA256: dict[ShotsName, str] = {
    "gsm8k": "f7b267f942be471e4ea8013cdba4c4df3cad1f969774c073e9165c568043a7b8",
    "minerva_math": "6637ad6e3ece303c059196bebdc3607ab9f617f4a57f73ac44afeb7f4320c829",
    "mathqa": "ba599b1fda1932b423e368b6a43643a10763cec1753dcdaca51375fdcd33c0cb",
    "mmlu_stem": "c5e61e1f80bbf4b08d60db5abaa55dcdc1a211093ce33e2a591ae9647bf8907a",
}
"""Of the harness's prompts/cot/NAME.md at db77bc6, white space around it left out."""


@pytest.mark.parametrize("name", SHA256)
def test_the_examples_are_the_harnesss(name: ShotsName) -> None:
    assert hashlib.sha256(load_shots(name).encode()).hexdigest() == SHA256[name]


@pytest.mark.parametrize("name", NINE)
def test_every_question_follows_the_examples_of_its_set(name: str) -> None:
    shots = SETS[name].shots
    start = "Question: " if shots == "gsm8k" else "Problem:\n"
    for item in read_items(name, str(TINY)):
        head, _, question = make_prompt(item.question, shots).rpartition("\n\n\n")
        assert head == load_shots(shots)
        assert question.startswith(start + item.question)


@pytest.mark.slow
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
    ours = [
        hashlib.sha256(make_prompt(item.question, SETS[name].shots).encode()).hexdigest()
        for item in read_items(name, str(SHARED))
    ]
    theirs = asked.stdout.split()
    assert len(theirs) == len(rows)
    assert [place for place in range(len(rows)) if ours[place] != theirs[place]] == []
