"""Which tokens stand around a text: one answer for a tokenizer, and what a user names instead."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tokenizers import AddedToken, processors

from pipeline.dataset.conventions import choose_conventions, describe_convention, name_tokens
from pipeline.dataset.files import open_dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.tokenization import TokenizerError, load_tokenizer
from schemas.manifest import ConventionRecord
from tests.support.datasets import build_dataset
from tests.support.tokenizer_zoo import (
    SHARED,
    cached_repository,
    definition,
    load,
    needs_shared,
    with_added,
    write_definition,
)

CHAT = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True}
LLAMA_3_CHAT = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
MISTRAL_CHAT = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}


def with_control(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a definition with further special tokens at its end."""
    return with_added(body, *(AddedToken(n, special=True, normalized=False) for n in names))


def llama_3_like() -> dict[str, Any]:
    """Byte-level, BOS by its template, `<|eot_id|>` for chats."""
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    body = with_control(definition("gpt2_like") | {"added_tokens": []}, *names)
    bos = body["added_tokens"][0]["id"]
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return body | {"post_processor": json.loads(template.__getstate__())}


def chat_like() -> dict[str, Any]:
    """As SmolLM2 and Qwen: no BOS, what separates documents and what ends a turn."""
    return with_control(definition("qwen_like"), "<|im_end|>")


def shared(name: str, *values: object) -> Any:
    file = SHARED / name / "tokenizer.json"
    marks = [needs_shared, pytest.mark.slow]
    return pytest.param(lambda: json.loads(file.read_text("utf-8")), *values, marks=marks, id=name)


@pytest.mark.parametrize(
    ("make", "config", "before", "after"),
    [
        (chat_like, CHAT, "<|endoftext|>", "<|endoftext|>"),
        (llama_3_like, LLAMA_3_CHAT, "<|begin_of_text|>", "<|end_of_text|>"),
        (lambda: definition("llama_like"), MISTRAL_CHAT, "<s>", "</s>"),
        shared("smollm2", CHAT, "<|endoftext|>", "<|endoftext|>"),
        shared("deepseek_llm", {}, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ],
)
def test_a_file_a_folder_and_a_repository_give_one_answer(
    make: Callable[[], dict[str, Any]],
    config: dict[str, Any],
    before: str,
    after: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chat model's own tokenizer_config.json names what ends a turn: it does not count."""
    bare, folder = tmp_path / "bare", tmp_path / "folder"
    bare.mkdir()
    folder.mkdir()
    snapshot = cached_repository(tmp_path, "owner/name")
    for place in (bare, folder, snapshot):
        write_definition(make(), place)
    for place in (folder, snapshot):
        (place / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = [load_tokenizer(n) for n in (str(bare / "tokenizer.json"), str(folder), "owner/name")]
    told = {(t.bos_token_id, t.eos_token_id, t.adds_bos, t.adds_eos) for t in found}
    assert len(told) == 1
    ids = found[0].find_token(before), found[0].find_token(after)
    assert found[0].around_text == ConventionRecord(ids[0], ids[0], ids[1])


def test_what_ends_a_turn_serves_where_nothing_separates_documents() -> None:
    body = deepcopy(definition("qwen_like"))
    body["added_tokens"][0]["content"] = "<|im_end|>"
    tokenizer = load_tokenizer(str(write_definition(body)))
    assert tokenizer.token_name(tokenizer.around_text.first_token_id or 0) == "<|im_end|>"


def test_a_counterpart_of_bos_ends_documents_before_other_separators() -> None:
    """Llama 2 with a token that somebody added after its pretraining."""
    body = with_control(definition("llama_like"), "<|endoftext|>")
    assert load_tokenizer(str(write_definition(body))).eos_token_id == 2


def test_tokens_are_found_by_name_and_by_id() -> None:
    tokenizer = load("llama_like")
    assert tokenizer.find_token("</s>") == 2
    assert tokenizer.find_token("2") == 2
    assert tokenizer.token_name(2) == "</s>"
    assert load("mistral_v1").find_token("</s>") == 2
    assert load("sentencepiece_bpe").token_name(1) == "<s>"
    for name in ("<eos>", "600000"):
        with pytest.raises(
            TokenizerError, match=rf'no token "{name}".* tokens are <unk>, <s>, </s>'
        ):
            tokenizer.find_token(name)


def test_named_tokens_replace_a_tokenizer_s_own() -> None:
    tokenizer = load("llama_like")
    own = tokenizer.around_text
    assert own == ConventionRecord(1, 1, 2)
    assert name_tokens(own, lambda: tokenizer) == own
    assert name_tokens(own, lambda: tokenizer, before="<unk>", after="none") == ConventionRecord(
        0, 0, None
    )
    assert name_tokens(own, lambda: tokenizer, before="none") == ConventionRecord(None, None, 2)


def test_a_dataset_s_conventions_are_chosen_by_name(tmp_path: Path) -> None:
    build_dataset(tmp_path, num_shards=1)
    dataset = open_dataset(tmp_path)
    assert choose_conventions(dataset) == dataset.manifest
    chosen = choose_conventions(dataset, student_eos="<s>", teacher_context="none")
    own = dataset.manifest.student.around_text
    assert chosen.student.around_text == replace(own, end_token_id=0)
    teacher = chosen.teacher.around_text
    assert (teacher.first_token_id, teacher.continued_token_id) == (None, None)
    told = describe_convention(chosen.student, load_dataset_tokenizer(dataset, "student"))
    assert told.endswith(", <s> (0) after it")
    with pytest.raises(TokenizerError, match='no token "<eos>"'):
        choose_conventions(dataset, student_bos="<eos>")
