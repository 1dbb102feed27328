import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from pipeline.tokenization import TokenizerError, load_tokenizer
from pipeline.tokenization.sources import find_tokenizer
from tests.support.tokenizer_zoo import MISTRAL_DATA, definition, load, source, write_definition

COMMIT = "0123456789abcdef" * 2 + "01234567"


def test_a_file() -> None:
    file = find_tokenizer(str(source("qwen_like")))
    assert (file.kind, file.file_name) == ("huggingface", "tokenizer.json")
    assert file.data == source("qwen_like").read_bytes()


def test_a_file_that_starts_with_white_space(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\n  " + source("qwen_like").read_bytes())
    assert find_tokenizer(str(path)).kind == "huggingface"


@pytest.mark.parametrize(
    "name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
)
def test_a_sentencepiece_model(name: str) -> None:
    tokenizer = load_tokenizer(str(MISTRAL_DATA / name))
    assert tokenizer.file_name == "tokenizer.model"
    assert tokenizer.vocab_size == {"t": 32000, "m": 32768}[name[0]]


def test_a_folder(tmp_path: Path) -> None:
    write_definition(definition("qwen_like"), tmp_path)
    shutil.copy(MISTRAL_DATA / "tokenizer.model.v1", tmp_path / "tokenizer.model")
    file = find_tokenizer(str(tmp_path))
    assert file.kind == "huggingface"
    assert load_tokenizer(f"{tmp_path}/").sha256 == load("qwen_like").sha256


def test_a_folder_with_one_sentencepiece_model(tmp_path: Path) -> None:
    shutil.copy(MISTRAL_DATA / "tokenizer.model.v1", tmp_path)
    assert find_tokenizer(str(tmp_path)).kind == "sentencepiece"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    with pytest.raises(
        TokenizerError,
        match=r"has no tokenizer\.json and 0 SentencePiece models or rank files among .*vocab\.txt",
    ):
        load_tokenizer(str(tmp_path))


def test_a_folder_with_several_models() -> None:
    with pytest.raises(TokenizerError, match=r"7 SentencePiece models or rank .* name one file"):
        load_tokenizer(str(MISTRAL_DATA))


def test_nothing_there() -> None:
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
    folder = "models--" + name.partition("@")[0].replace("/", "--")
    snapshot = tmp_path / folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    write_definition(definition("llama_like"), snapshot)
    references = snapshot.parents[1] / "refs"
    references.mkdir()
    (references / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    tokenizer = load_tokenizer(name)
    assert tokenizer.source == name
    assert tokenizer.sha256 == load("llama_like").sha256


def test_a_file_of_no_kind(tmp_path: Path) -> None:
    path = tmp_path / "merges.txt"
    path.write_text("#version: 0.2\nt h\n")
    with pytest.raises(TokenizerError, match=r"is no tokenizer\.json, no SentencePiece"):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"model": {"type": "BPE", "vo', "is no valid JSON"),
        (b"[1, 2]", 'no tokenizer.json .no "model".'),
        (b'{"model": {"type": "BPE"}, "added_tokens": []}', "does not load"),
        (b'{"model": {"type": "New", "vocab": {}}, "added_tokens": []}', "does not load"),
        (
            b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{}]}',
            "load",
        ),
    ],
)
def test_broken_json(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(path))


def test_a_cut_sentencepiece_model(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes((MISTRAL_DATA / "tokenizer.model.v1").read_bytes()[:1000])
    with pytest.raises(TokenizerError, match="is no SentencePiece model"):
        load_tokenizer(str(path))


def test_a_tokenizer_that_loses_letters_is_refused(tmp_path: Path) -> None:
    removal = {"type": "Replace", "pattern": {"Regex": "[aeiou]"}, "content": ""}
    write_definition(definition("gpt2_like") | {"normalizer": removal}, tmp_path)
    with pytest.raises(TokenizerError, match="lossy beyond repair: its offsets leave 10 of 44"):
        load_tokenizer(str(tmp_path))


def test_dropout_is_refused(tmp_path: Path) -> None:
    body = json.loads(json.dumps(definition("gpt2_like")))
    body["model"]["dropout"] = 0.1
    with pytest.raises(TokenizerError, match=r"BPE dropout 0\.1.*set \"dropout\" to null"):
        load_tokenizer(str(write_definition(body, tmp_path)))


def test_added_tokens_whose_ids_the_library_changes_are_refused(tmp_path: Path) -> None:
    body = json.loads(json.dumps(definition("qwen_like")))
    body["added_tokens"][-1]["id"] += 7
    with pytest.raises(TokenizerError, match=r"'<tool_call>' has id 430 in the file but .* 423"):
        load_tokenizer(str(write_definition(body, tmp_path)))


def test_a_bpe_that_drops_unknown_characters_is_refused(tmp_path: Path) -> None:
    body = json.loads(json.dumps(definition("llama_like")))
    body["model"] |= {"unk_token": None, "byte_fallback": False}
    with pytest.raises(TokenizerError, match=r"characters that its BPE lacks vanish.*unk_token"):
        load_tokenizer(str(write_definition(body, tmp_path)))
    body["model"]["byte_fallback"] = True
    assert load_tokenizer(str(write_definition(body, tmp_path))).fast
