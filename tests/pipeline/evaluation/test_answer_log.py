"""The log that a killed run continues from."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs vocag[evaluate]")

from pipeline.evaluation.answer_log import AnswerLog
from tests.support.scripted_model import ScriptedModel


@pytest.mark.parametrize("line", ["garbage", "7", '{"key": "a"}'])
def test_a_garbled_line_is_named_with_its_remedy(line: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(f'{{"key": "a", "answer": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl: line 2 .*: delete the line"):
        AnswerLog(ScriptedModel(), file)
