"""Texts that spell the name of a byte, under models that have a piece for each byte."""

import json
from pathlib import Path

import pytest

from pipeline.tokenization import Tokenizer, load_tokenizer
from tests.support import tokenizer_zoo as zoo


@pytest.fixture(scope="module")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a Unigram model whose bytes are pieces, as LLM-jp's and Sarashina's are."""
    body = json.loads(json.dumps(zoo.definition("unigram")))
    model = body["model"]
    bytes_of = [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    known = {piece for piece, _ in bytes_of}
    model["vocab"] = [entry for entry in model["vocab"] if entry[0] not in known] + bytes_of
    model["byte_fallback"] = True
    return load_tokenizer(str(zoo.write_definition(body, tmp_path_factory.mktemp("unigram"))))


@pytest.mark.parametrize(
    "text",
    [
        "ends with <0x0A> here",
        "print('<0x41>')",
        "<0x0A>",
        " <0x0A>",
        "a line\nand <0x0A>\n<0x0A><0x0A>\n",
        "<0x3C><0x3C>0x3C><0x",
        "ｆｕｌｌ ＜0x0A＞ and ﬁ <0x0a> <0x0G>",
    ],
)
def test_a_name_of_a_byte_is_text_with_a_range_of_its_own(unigram: Tokenizer, text: str) -> None:
    batch = unigram.tokenize_batch([text.encode()])
    assert batch.failures == {}
    assert unigram.find_unproven(batch.input_ids, batch.byte_offsets, text.encode()) == []
    newline = unigram.find_token("<0x0A>")
    ranges = batch.byte_offsets[batch.input_ids == newline].tolist()
    covered = {text.encode()[start:end] for start, end in ranges}
    assert covered <= {b"\n", b"<0x0A>", "＜0x0A＞".encode()}
    assert bool(covered) == ("<0x0A>" in text)


def test_a_wrong_range_of_a_byte_is_found(unigram: Tokenizer) -> None:
    text = b"ends with <0x0A> here"
    batch = unigram.tokenize_batch([text])
    wrong = batch.byte_offsets.copy()
    place = int((batch.input_ids == unigram.find_token("<0x0A>")).argmax())
    wrong[place] -= 1
    assert place in unigram.find_unproven(batch.input_ids, wrong, text)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, "ids of single bytes"),
        (
            {"tokenizer.jsonl": "[]", "tokenization_plamo.py": ""},
            "code of its own .tokenization",
        ),
        ({"vocab.json": "{}", "merges.txt": ""}, "don't say how a text is split"),
    ],
)
def test_a_folder_is_refused_with_what_can_be_done(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(str(tmp_path))
    assert not getattr(caught.value, "__notes__", []), "no remedy that can't work"


def test_a_folder_that_transformers_can_convert_names_the_command(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ValueError, match="convert it with AutoTokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "AutoTokenizer.from_pretrained" in "".join(caught.value.__notes__)
