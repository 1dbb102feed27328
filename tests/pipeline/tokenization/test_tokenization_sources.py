import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import tokenizers

from pipeline.tokenization import PROBES, TokenizerError, load_tokenizer
from pipeline.tokenization.sources import find_tokenizer
from tests.support.token_batches import require_equal
from tests.support.tokenizer_zoo import (
    COMMIT,
    MISTRAL_DATA,
    cached_repository,
    definition,
    source,
    write_definition,
)

MISTRAL_MODEL = MISTRAL_DATA / "tokenizer.model.v1"


@pytest.mark.parametrize("before", [b"", b"\n  "])
def test_a_file(before: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(before + source("qwen_like").read_bytes())
    file = find_tokenizer(str(path))
    assert (file.kind, file.file_name) == ("huggingface", "tokenizer.json")
    assert file.data == path.read_bytes()


def test_a_folder(tmp_path: Path) -> None:
    marian = Path(shutil.copy(MISTRAL_DATA / "tokenizer.model.v1", tmp_path / "source.spm"))
    assert {find_tokenizer(str(path)).kind for path in (tmp_path, marian)} == {"sentencepiece"}
    shutil.copy(MISTRAL_DATA / "tokenizer.model.v1", tmp_path / "tokenizer.model")
    write_definition(definition("qwen_like"), tmp_path)
    assert find_tokenizer(f"{tmp_path}/").data == source("qwen_like").read_bytes()
    (own := tmp_path / "model" / "tokenizer").mkdir(parents=True)
    write_definition(definition("qwen_like"), own)
    assert find_tokenizer(str(own.parent)).data == source("qwen_like").read_bytes()


def test_folders_without_one_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    message = r"has no tokenizer\.json and 0 SentencePiece models or rank files among .*vocab\.txt"
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(tmp_path))
    with pytest.raises(TokenizerError, match=r"7 SentencePiece models or rank .* name one file"):
        load_tokenizer(str(MISTRAL_DATA))
    with pytest.raises(TokenizerError, match=r'"missing\.json": no such file or folder'):
        load_tokenizer("missing.json")


def test_a_repository_that_can_not_be_reached() -> None:
    with pytest.raises(TokenizerError, match=r"can't be reached .*holds no tokenizer\.json"):
        load_tokenizer("nobody/no-such-model")


@pytest.mark.parametrize(
    "name", ["owner/name", "owner/name@main", f"owner/name@{COMMIT}", "name", "name@main"]
)
def test_a_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's client keeps it on disk: nothing is downloaded here."""
    snapshot = cached_repository(tmp_path, name.partition("@")[0])
    write_definition(definition("llama_like"), snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    file = find_tokenizer(name)
    assert (file.source, file.data) == (name, source("llama_like").read_bytes())


def test_a_gguf_file_has_its_model_s_tokenizer(smollm2: Path, tmp_path: Path) -> None:
    from packaged_model import find_gguf

    tokenizer, expected = load_tokenizer(str(find_gguf())), load_tokenizer(str(smollm2))
    text = "def f(x):\n    return x  # naïve 数学".encode()
    require_equal(tokenizer.tokenize_batch([text]), expected.tokenize_batch([text]))
    assert tokenizer.around_text == expected.around_text
    assert tokenizer.file_name == "tokenizer.json"
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(TokenizerError, match=r"model\.gguf.*name the model's tokenizer\.json"):
        load_tokenizer(str(broken))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b'{"model": {"type": "BPE", "vo', "isn't valid JSON"),
        ("tokenizer.json", b"\xef\xbb\xbf{}", r"tokenizer\.json\" begins with a byte-order mark"),
        ("tokenizer.json", b"[1, 2]", 'neither a tokenizer.json .no "model".'),
        ("tokenizer.json", b'{"model": {"type": "BPE"}, "added_tokens": []}', "does not load"),
        ("tokenizer.json", b'{"model": {"type": "New", "vocab": {}}}', "does not load"),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{}]}',
            "load",
        ),
        ("tokenizer.model", MISTRAL_MODEL.read_bytes()[:1000], "isn't a SentencePiece model"),
        ("merges.txt", b"#version: 0.2\nt h\n", r"is not a tokenizer\.json, a SentencePiece"),
    ],
)
def test_broken_files(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(path))


def test_rwkv_s_list_of_tokens_is_refused_with_what_would_help(tmp_path: Path) -> None:
    path = tmp_path / "rwkv_vocab_v20230424.txt"
    path.write_text("1 '\\x00' 1\n2 b'\\xc3' 1\n")
    for name in (path, tmp_path):
        with pytest.raises(TokenizerError, match=r"RWKV's own, .* take an RWKV model with"):
            load_tokenizer(str(name))


@pytest.mark.parametrize("name", ["unigram", "word_pieces", "qwen_like", "words"])
def test_files_before_tokenizers_0_9_have_no_model_type(name: str) -> None:
    """The library tells models apart by their fields, and so do we."""
    body = json.loads(json.dumps(definition("word_pieces" if name == "words" else name)))
    if name == "words":
        model = {"type": "WordLevel", "vocab": body["model"]["vocab"], "unk_token": "[UNK]"}
        body["model"] = model
    typed = load_tokenizer(str(write_definition(body)))
    del body["model"]["type"]
    untyped = load_tokenizer(str(write_definition(body)))
    texts = [probe.encode() for probe in PROBES]
    require_equal(typed.tokenize_batch(texts), untyped.tokenize_batch(texts))
    assert (typed.fast, typed.slow_reason) == (untyped.fast, untyped.slow_reason)
    library = tokenizers.Tokenizer.from_str(untyped.file_bytes.decode())
    text = "the theorem of the sum"
    ids = untyped.tokenize_batch([text.encode()]).input_ids.tolist()
    assert ids == library.encode(text, add_special_tokens=False).ids


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> str:
    body = json.loads(json.dumps(definition(name)))
    change(body)
    return str(write_definition(body))


VOWELS = {"type": "Replace", "pattern": {"Regex": "[aeiou]"}, "content": ""}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2_like", lambda b: b.update(normalizer=VOWELS), "lossy beyond repair: .* 7 of 24"),
        ("gpt2_like", lambda b: b["model"].update(dropout=0.1), r"BPE dropout 0\.1"),
        ("qwen_like", lambda b: b["added_tokens"][-1].update(id=430), "has id 430 .* but .* 423"),
        (
            "llama_like",
            lambda b: b["model"].update(unk_token=None, byte_fallback=False),
            r"characters that its BPE lacks vanish.*unk_token",
        ),
    ],
)
def test_tokenizers_that_can_not_be_used(
    name: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(changed(name, change))


def test_byte_fallback_needs_no_unknown_token() -> None:
    path = changed("llama_like", lambda b: b["model"].update(unk_token=None, byte_fallback=True))
    assert load_tokenizer(path).fast
