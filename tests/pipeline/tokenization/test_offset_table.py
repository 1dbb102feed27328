"""Texts and settings on which tokenizers' offsets are known to mislead an alignment.

What the library reports is wrong in most of them; ours is exact.
"""

import json
from pathlib import Path

import pytest
import tokenizers

from pipeline.alignment import AlignmentError, align_tokens
from pipeline.tokenization import load_tokenizer
from tests.support.offset_strategies import make_tokens
from tests.support.tokenizer_zoo import definition, load, source, without_bytes, write_definition


def library(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(source(name)))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # Pieces of one character get a byte each: four bytes, and no merge knows them.
        ("qwen_like", "𝔘", [[0, 1], [1, 2], [2, 3], [3, 4]]),
        ("llama_like", "𝔘", [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]),
        # A dummy prefix or an added space covers no byte, and overlaps nothing.
        ("llama_like", "\rHi", [[0, 0], [0, 1], [1, 2], [2, 3]]),
        ("llama_like", " the", [[0, 0], [0, 3], [3, 4]]),
        ("gpt2_like", "xq", [[0, 1], [1, 2]]),
        ("gpt2_like", "9", [[0, 0], [0, 1]]),
        # `trim_offsets` is switched off.
        ("qwen_like", "x   y", [[0, 1], [1, 3], [3, 5]]),
        # What a normaliser composed belongs to the result.
        ("qwen_like", "e\u0301", [[0, 3]]),
        ("qwen_like", "xe\u0301y", [[0, 1], [1, 4], [4, 5]]),
        ("qwen_like", "\u1112\u1161\u11ab", [[0, 9]] * 3),
        # No special token comes around a text: `▁`, not BOS.
        ("unigram", "sum", [[0, 3]]),
        ("llama_like", "sum", [[0, 0], [0, 3]]),
        # A byte-incomplete vocabulary leaves out what it can't spell.
        ("byte_incomplete", "xΞy", [[0, 1], [3, 4]]),
        ("byte_incomplete", "x𝔘y", [[0, 1], [2, 3], [3, 4], [4, 5], [5, 6]]),
        ("byte_incomplete", "x\x04y", [[0, 1], [2, 3]]),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_offsets(name: str, text: str, expected: list[list[int]], fast: bool) -> None:
    batch = load(name, fast=fast).tokenize_batch([text.encode()])
    assert not batch.failures
    assert batch.byte_offsets.tolist() == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("unigram", " </s>.", [[0, 1], [1, 5], [5, 5], [5, 6]]),
        ("gpt2_like", " 9<|endoftext|>9", [[0, 1], [1, 2], [2, 15], [15, 15], [15, 16]]),
    ],
)
def test_a_space_put_behind_an_added_token_is_no_dummy_prefix(
    name: str, text: str, expected: list[list[int]]
) -> None:
    """Lengths exceed the text's by one, and the first token is a space: both as if it were."""
    for fast in (True, False):
        tokenizer = load(name, special_strings="honoured", fast=fast)
        assert tokenizer.tokenize_batch([text.encode()]).byte_offsets.tolist() == expected


@pytest.mark.parametrize("fast", [True, False])
def test_a_space_put_before_each_piece_is_no_dummy_prefix(tmp_path: Path, fast: bool) -> None:
    body = definition("gpt2_like")
    splits = [{"type": "Digits", "individual_digits": True}, body["pre_tokenizer"]]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": splits}
    write_definition(body | {"pre_tokenizer": pre_tokenizer, "added_tokens": []}, tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), fast=fast)
    batch = tokenizer.tokenize_batch([b" Z9"])
    assert batch.byte_offsets.tolist() == [[0, 1], [1, 2], [2, 2], [2, 3]]
    assert not tokenizer.find_unproven(batch.input_ids, batch.byte_offsets, b" Z9")


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    reference = library("qwen_like")
    reference.enable_padding(length=12, pad_id=0, pad_token="x")
    reference.enable_truncation(4)
    write_definition(json.loads(reference.to_str()), tmp_path)
    text = b"the sum of the theorem of the sum"
    for fast in (True, False):
        batch = load_tokenizer(str(tmp_path), fast=fast).tokenize_batch([b"x", text])
        expected = load("qwen_like").tokenize_batch([b"x", text])
        assert batch.input_ids.tolist() == expected.input_ids.tolist()
        assert batch.cu_tokens.tolist() == expected.cu_tokens.tolist()


def test_offsets_of_encode_batch_fast_are_refused() -> None:
    (reported,) = library("qwen_like").encode_batch_fast(["the sum"])
    assert set(reported.offsets) == {(0, 0)}
    blind, good = (make_tokens([pairs], 7) for pairs in (reported.offsets, [(0, 7)]))
    with pytest.raises(AlignmentError, match=r"all \(0, 0\) in document 0.*encode_batch_fast"):
        align_tokens(blind, good)
    with pytest.raises(AlignmentError, match=r"teacher offsets are all \(0, 0\)"):
        align_tokens(good, blind)


@pytest.mark.parametrize("name", ["sentencepiece_unigram", "sentencepiece_nfkc"])
def test_sentencepiece_s_offsets_are_bytes(name: str) -> None:
    """Its normaliser rewrites `ﬁ` and drops spaces, so reported ranges are what there is."""
    text = "  ßé  ﬁ数"
    batch = load(name).tokenize_batch([text.encode()])
    spans = [text.encode()[start:end].decode() for start, end in batch.byte_offsets]
    assert "".join(dict.fromkeys(spans)).replace(" ", "") == "ßéﬁ数"
    assert batch.byte_offsets[-1].tolist() == [11, 14]
    assert not batch.tiles[0]


def test_a_dropped_character_in_a_rewritten_text(tmp_path: Path) -> None:
    write_definition(without_bytes(definition("qwen_like"), b"\x04"), tmp_path)
    texts = [b"x\x04y", "\x04 e\u0301".encode(), "e\u0301".encode()]
    batch = load_tokenizer(str(tmp_path)).tokenize_batch(texts)
    assert batch.byte_offsets.tolist() == [[0, 1], [2, 3], [1, 5], [0, 3]]
    assert not batch.failures


def test_dropped_characters_and_a_prefix_space(tmp_path: Path) -> None:
    prefixing = definition("gpt2_like")["pre_tokenizer"]
    write_definition(definition("byte_incomplete") | {"pre_tokenizer": prefixing}, tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    for text, expected in (
        ("x\x04y", [[0, 1], [2, 3]]),
        ("9Ξ9", [[0, 0], [0, 1], [3, 4]]),
        ("\x04", [[0, 0]]),
        ("𝔘", [[0, 0], [1, 2], [2, 3], [3, 4]]),
    ):
        batch = tokenizer.tokenize_batch([text.encode()])
        assert batch.byte_offsets.tolist() == expected, text
        assert not tokenizer.find_unproven(batch.input_ids, batch.byte_offsets, text.encode())


def test_lossy_word_pieces_leave_white_space_out() -> None:
    text = "Sum  naïve"
    batch = load("word_pieces").tokenize_batch([text.encode()])
    covered = {byte for start, end in batch.byte_offsets for byte in range(start, end)}
    assert covered == {0, 1, 2, *range(5, 11)}
    assert not batch.tiles[0]
