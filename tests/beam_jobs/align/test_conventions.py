"""Tokens around a text that a tokenizer's file doesn't settle."""

import json
from pathlib import Path

import pytest

from beam_jobs.align.__main__ import main
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.tokenization.definition import added_token, text_template
from tests.support import tokenizer_zoo as zoo
from tests.support.corpus import align_options, command_line, json_line, small_corpus


def write_tokenizer(folder: Path, names: list[str], before: list[str]) -> str:
    """Write a small tokenizer that has these control tokens, and puts some before a text."""
    body = dict(zoo.definition("qwen_like"))
    first = 1 + max(body["model"]["vocab"].values())
    ids = {name: first + place for place, name in enumerate(names)}
    body["added_tokens"] = [added_token(token_id, name) for name, token_id in ids.items()]
    chosen = [ids[name] for name in before]
    named = {token_id: name for name, token_id in ids.items()}
    body["post_processor"] = text_template(chosen, [], named) if before else None
    folder.mkdir()
    return str(zoo.write_definition(json.loads(json.dumps(body)), folder))


def test_a_template_of_two_tokens_is_refused_until_one_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    glm = write_tokenizer(
        tmp_path / "t", ["<|endoftext|>", "[gMASK]", "<sop>"], ["[gMASK]", "<sop>"]
    )
    corpus = small_corpus(tmp_path / "c", a=[json_line("a", "text")])
    for side, option in (("student", "--student-bos"), ("teacher", "--teacher-context")):
        options = align_options(corpus, tmp_path / side, **{side: glm})
        assert main(command_line(options)) == 2
        error = capsys.readouterr().err
        assert "puts 2 tokens before a text, [gMASK] <sop>, and rows have room for one" in error
        assert f"hint: {option} '<sop>'" in error
        assert main([*command_line(options), option, "<sop>"]) == 0
        assert "<sop>" in capsys.readouterr().out
    made = read_manifest(str(tmp_path / "teacher"))
    again = ["--input", str(tmp_path / "teacher"), "--output", str(tmp_path / "again")]
    assert main(again) == 0, "a dataset keeps what was chosen"
    assert read_manifest(str(tmp_path / "again")).teacher.around_text == made.teacher.around_text


def test_control_tokens_of_which_none_is_known_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    minimax = write_tokenizer(tmp_path / "t", ["]!p~[", "[e~["], [])
    corpus = small_corpus(tmp_path / "c", a=[json_line("a", "text")])
    options = align_options(corpus, tmp_path / "out", student=minimax, teacher=minimax)
    assert main(command_line(options)) == 0
    (told,) = [r.getMessage() for r in caplog.records if "is known" in r.getMessage()]
    assert "2 control tokens (]!p~[, [e~[), of which none is known to begin or end a text" in told
    assert told.endswith("choose with --student-bos, --teacher-context, --student-eos")
    caplog.clear()
    chosen = ["--student-bos=none", "--teacher-context=]!p~["]
    options = align_options(corpus, tmp_path / "chosen", student=minimax, teacher=minimax)
    assert main([*command_line(options), *chosen]) == 0
    plain = write_tokenizer(tmp_path / "plain", [], [])  # has none, so none is missing
    options = align_options(corpus, tmp_path / "other", student=plain)
    assert main(command_line(options)) == 0
    assert "is known" not in caplog.text
