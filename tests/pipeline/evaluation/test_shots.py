"""Prompts: byte for byte the harness's."""

from hashlib import sha256
from pathlib import Path

import pytest

from pipeline.evaluation.set_files import read_items
from pipeline.evaluation.sets import NINE, SETS, ShotsName, load_shots, make_prompt

TINY = Path(__file__).parents[2] / "data" / "evaluation"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "benchmarks"

SHA256: dict[ShotsName, str] = {
    "gsm8k": "f7b267f942be471e4ea8013cdba4c4df3cad1f969774c073e9165c568043a7b8",
    "minerva_math": "6637ad6e3ece303c059196bebdc3607ab9f617f4a57f73ac44afeb7f4320c829",
    "mathqa": "ba599b1fda1932b423e368b6a43643a10763cec1753dcdaca51375fdcd33c0cb",
    "mmlu_stem": "c5e61e1f80bbf4b08d60db5abaa55dcdc1a211093ce33e2a591ae9647bf8907a",
}
"""Of the harness's prompts/cot/NAME.md at db77bc6, white space around it left out."""

ALL_PROMPTS = {
    "gsm8k": (1319, "2c143d90690b7bc44f98af53563cadb7f77194e1246a2f4d9eb41a530e819c3a"),
    "math": (500, "08bc2f26f6e4240fb4a799cd94304bd2dabe0a62d0a9a023f063c05b3f0b47b3"),
    "svamp": (1000, "50a67aba18028123c7b60367e5a246e1992538fa29950112be1852a7deb3d590"),
    "asdiv": (2215, "0839d85395682405a54116061b7f985838e69d9e1e938f62a1fcebf6495e8077"),
    "mawps": (2065, "c0d9b5f1dfaf5aa30cb828d8bda980ec62f3cdd93998b1409043a05532ec1961"),
    "tabmwp": (1000, "e012ef8347b8573e39ce89000711b015ca0e2b560381b04f7a4f519bc9220ece"),
    "mathqa": (1000, "ad634897c169e5c7b5fbae81a6534a52129d090305566c2c518045d8701cddc2"),
    "mmlu_stem": (3018, "755934109090f717ffbfca39602c349cf5ff17ee530d602bcf4f2e722aebb0df"),
    "sat_math": (32, "ae8a0c25e98fb6168c4dbdd65b4121450a602997f1152e16b6227a1b20068d12"),
}
"""Number and SHA-256 of what the harness's own `parse_question` and `construct_prompt` (db77bc6)
make of its files: of the lines of the prompts' own SHA-256."""


@pytest.mark.parametrize("name", SHA256)
def test_the_examples_are_the_harnesss(name: ShotsName) -> None:
    assert sha256(load_shots(name).encode()).hexdigest() == SHA256[name]


@pytest.mark.parametrize("name", NINE)
def test_every_question_follows_the_examples_of_its_set(name: str) -> None:
    shots = SETS[name].shots
    start = "Question: " if shots == "gsm8k" else "Problem:\n"
    for item in read_items(name, str(TINY)):
        head, _, question = make_prompt(item.question, shots).rpartition("\n\n\n")
        assert head == load_shots(shots)
        assert question.startswith(start + item.question)


@pytest.mark.parametrize("name", NINE)
def test_prompts_equal_the_harnesss_byte_for_byte(name: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data/benchmarks")
    prompts = [make_prompt(i.question, SETS[name].shots) for i in read_items(name, str(SHARED))]
    lines = "\n".join(sha256(prompt.encode()).hexdigest() for prompt in prompts)
    assert (len(prompts), sha256(lines.encode()).hexdigest()) == ALL_PROMPTS[name]
