"""Chat template, ends and sampling of a model: read from its folder, carried, mapped by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from pipeline.dataset.conventions import describe_tokenizer
from pipeline.models.exported_tokenizer import KnownText, convert_tokenizer
from pipeline.models.generation_defaults import (
    GenerationDefaults,
    in_vocabulary,
    read_generation_defaults,
)
from pipeline.models.hf_models import load_language_model
from pipeline.tokenization import Tokenizer
from pipeline.transfer.command import main as transfer
from tests.support.datasets import byte_level, with_control_tokens
from tests.support.hf_folders import make_instruct, write_gguf, write_model

CHAT = with_control_tokens(byte_level(400), "<|im_start|>", "<|im_end|>")
MESSAGES = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]


def _export(folder: Path, defaults: GenerationDefaults, tokenizer: Any = CHAT) -> None:
    text = "Two and two is four."
    ids = tokenizer.tokenize_batch([text.encode()]).input_ids.tolist()
    record = describe_tokenizer(tokenizer, "tokenizer")
    config = json.loads((folder / "config.json").read_text())
    known = [KnownText("a text", text, ids)]
    convert_tokenizer(tokenizer, record, known, config=config, defaults=defaults).write(folder)


@pytest.mark.parametrize("in_map", [False, True])
def test_a_begin_that_is_null_stays_nothing_in_a_template(in_map: bool, tmp_path: Path) -> None:
    """The exported tokenizer names its vocabulary's, and the template wrote it."""
    tokenizer = with_control_tokens(byte_level(400), "<s>", "</s>")
    own, trained = (write_model(tmp_path / name, tokenizer) for name in ("own", "trained"))
    (own / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    settings = {"bos_token": None, "eos_token": "</s>"}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    if in_map:  # which transformers then reads
        (own / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    _export(trained, read_generation_defaults(str(own)), tokenizer)
    for folder in (own, trained):
        chat = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False)
        assert chat == ("<s>Two and two?" if in_map else "Two and two?")


@pytest.mark.parametrize("layout", ["config", "list", "jinja", "more jinja"])
def test_an_exported_model_chats_as_its_own_and_its_files_agree(
    layout: str, tmp_path: Path
) -> None:
    own = make_instruct(write_model(tmp_path / "own", CHAT), CHAT, layout=layout)
    trained = write_model(tmp_path / "trained", CHAT)
    _export(trained, read_generation_defaults(str(own)))
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (own, trained))
    for name in ("default", "tool") if layout in ("list", "more jinja") else ("",):
        given = {"chat_template": name} if name else {}
        chats = [
            one.apply_chat_template(MESSAGES, tokenize=False, **given) for one in (before, after)
        ]
        assert chats[0] == chats[1]
        assert "<|im_end|>" in chats[0]
    config, generation = (
        AutoConfig.from_pretrained(trained),
        GenerationConfig.from_pretrained(trained),
    )
    end = CHAT.eos_token_id
    assert config.eos_token_id == generation.eos_token_id
    assert config.eos_token_id == [end, CHAT.find_token("<|im_end|>")]
    assert after.eos_token_id == end
    for name in ("bos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(generation, name) == getattr(after, name)
    assert (generation.temperature, generation.top_p, generation.do_sample) == (0.6, 0.9, True)
    # Once more, from what was exported: nothing is added.
    again = read_generation_defaults(str(trained))
    text = again.chat_template(
        {f"{role}_token": getattr(after, f"{role}_token") for role in ("bos", "eos", "pad")}
    )
    assert text == json.loads((trained / "tokenizer_config.json").read_text())["chat_template"]


@pytest.mark.parametrize("layout", ["config", "jinja"])
def test_a_tokenizer_in_a_folder_of_its_own_keeps_its_template(layout: str, tmp_path: Path) -> None:
    """As where transformers would change it next to the model's config.json."""
    model = make_instruct(write_model(tmp_path / "own", CHAT), CHAT, layout=layout)
    expected = read_generation_defaults(str(model))
    assert expected.templates
    (model / "tokenizer").mkdir()
    for file in [*model.glob("tokenizer*.json"), *model.glob("*.jinja")]:
        file.rename(model / "tokenizer" / file.name)
    assert read_generation_defaults(str(model)) == expected
    texts = tmp_path / "texts.txt"
    texts.write_text("Two and two is four.")
    given = [str(model), "--tokenizer", "bytes", "--text", str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 0


def test_a_gguf_files_model_is_saved_with_its_own_template(tmp_path: Path) -> None:
    """Not with that of its folder, which may hold several models."""
    make_instruct(tmp_path, CHAT)
    file = write_gguf(tmp_path / "student.gguf", CHAT)
    model = load_language_model(str(file))
    defaults = read_generation_defaults(model.config.name_or_path)
    own = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert defaults.templates == {"default": own.chat_template}
    assert defaults.names == {role: getattr(own, role) for role in ("eos_token", "pad_token")}
    assert defaults.end_ids == (CHAT.find_token("<|im_end|>"),)
    model.save_pretrained(tmp_path / "saved")
    saved = load_language_model(str(tmp_path / "saved"))
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_a_bare_model_says_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path, byte_level(400))
    (folder / "generation_config.json").unlink()
    assert read_generation_defaults(str(folder)) == GenerationDefaults()


def test_a_model_that_is_gone_leaves_its_ways_behind(caplog: pytest.LogCaptureFixture) -> None:
    """As a Megatron run's student may be when its checkpoint is exported."""
    assert read_generation_defaults("/no/such/folder") == GenerationDefaults()
    assert "chat template, further ends and sampling are left out" in caplog.text
    assert read_generation_defaults("") == GenerationDefaults()


def _moved(
    own: GenerationDefaults, new: Tokenizer, *, without: int = 0
) -> tuple[GenerationDefaults, list[str]]:
    return in_vocabulary(own, CHAT, new, num_rows=new.vocab_size - without)


def test_another_vocabulary_gets_what_it_has_tokens_for(tmp_path: Path) -> None:
    own = make_instruct(write_model(tmp_path / "own", CHAT), CHAT)
    defaults = read_generation_defaults(str(own))
    fitting = with_control_tokens(byte_level(350), "<|x|>", "<|im_end|>", "<|im_start|>")
    mapped, left = _moved(defaults, fitting)
    assert (left, mapped.templates, mapped.settings) == ([], defaults.templates, defaults.settings)
    assert mapped.end_ids == (fitting.eos_token_id, fitting.find_token("<|im_end|>"))
    mapped, left = _moved(defaults, byte_level(350))
    assert left == [
        "the default chat template (no token <|im_start|>, <|im_end|>)",
        "the end <|im_end|>",
    ]
    assert (mapped.templates, mapped.end_ids) == ({}, (byte_level(350).eos_token_id,))
    ids = GenerationDefaults(
        settings={"suppress_tokens": [7], "top_k": 5, "forced_bos_token_id": 3}
    )
    mapped, left = _moved(ids, fitting)
    assert (mapped.settings, left) == ({"top_k": 5}, ["suppress_tokens", "forced_bos_token_id"])
    mapped, left = _moved(defaults, fitting, without=1)  # <|im_start|> has no row
    assert left == ["the default chat template (no token <|im_start|>)"]
    assert mapped.end_ids == (fitting.eos_token_id, fitting.find_token("<|im_end|>"))
