"""Texts and settings on which tokenizers' offsets are known to mislead an alignment.

Each test shows what the library reports, and that ours is exact.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from pipeline.alignment import AlignmentError, align_batch, align_tokens
from pipeline.batches import SourceDocument, TokenBatch
from pipeline.tokenization import load_tokenizer
from tests.support.tokenizer_zoo import definition, load, source, without_bytes, write_definition


def offsets(name: str, text: str, *, fast: bool = True) -> list[list[int]]:
    batch = load(name, fast=fast).tokenize_batch([text.encode()])
    assert not batch.failures
    pairs: list[list[int]] = batch.byte_offsets.tolist()
    return pairs


def library(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(source(name)))


def hand_made(*pairs: tuple[int, int]) -> TokenBatch:
    return TokenBatch(
        input_ids=np.zeros(len(pairs), np.uint32),
        byte_offsets=np.array(pairs, np.int64).reshape(-1, 2),
        cu_tokens=np.array([0, len(pairs)]),
        tiles=np.array([False]),
    )


both_paths = pytest.mark.parametrize("fast", [True, False])


@both_paths
def test_pieces_of_one_character_get_a_byte_each(fast: bool) -> None:
    letter = "𝔘"  # four bytes, and no merge knows them
    assert library("qwen_like").encode(letter).offsets == [(0, 1)] * 4
    assert offsets("qwen_like", letter, fast=fast) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert library("llama_like").encode(letter, add_special_tokens=False).offsets == [(0, 1)] * 5
    expected = [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert offsets("llama_like", letter, fast=fast) == expected


@both_paths
def test_the_dummy_prefix_covers_no_byte(fast: bool) -> None:
    reported = library("llama_like").encode("\rHi", add_special_tokens=False)
    assert reported.tokens[:2] == ["▁", "<0x0D>"]
    assert reported.offsets[:2] == [(0, 1), (0, 1)]
    assert offsets("llama_like", "\rHi", fast=fast)[:3] == [[0, 0], [0, 1], [1, 2]]
    assert offsets("mistral_v1", "\nHi", fast=fast)[:2] == [[0, 0], [0, 1]]


@both_paths
def test_the_dummy_prefix_before_a_space_overlaps_nothing(fast: bool) -> None:
    reported = library("llama_like").encode(" the", add_special_tokens=False)
    assert reported.tokens == ["▁", "▁th", "e"]
    assert reported.offsets == [(0, 1), (0, 3), (3, 4)]
    assert offsets("llama_like", " the", fast=fast) == [[0, 0], [0, 3], [3, 4]]


@both_paths
def test_an_added_prefix_space_covers_no_byte(fast: bool) -> None:
    assert library("gpt2_like").encode("xq").tokens == ["Ġx", "q"]
    assert offsets("gpt2_like", "xq", fast=fast) == [[0, 1], [1, 2]]
    assert library("gpt2_like").encode("9").tokens == ["Ġ", "9"]
    assert offsets("gpt2_like", "9", fast=fast) == [[0, 0], [0, 1]]


@both_paths
def test_trim_offsets_is_switched_off(fast: bool) -> None:
    reported = library("qwen_like").encode("x   y")
    assert reported.tokens[1] == "ĠĠ"
    assert reported.offsets[1] == (3, 3)
    assert offsets("qwen_like", "x   y", fast=fast) == [[0, 1], [1, 3], [3, 5]]


@both_paths
def test_what_a_normaliser_composed_belongs_to_the_result(fast: bool) -> None:
    reported = library("qwen_like").encode("e\u0301")
    assert reported.tokens == ["Ã©"]
    assert reported.offsets == [(0, 1)]
    assert offsets("qwen_like", "e\u0301", fast=fast) == [[0, 3]]
    assert offsets("qwen_like", "xe\u0301y", fast=fast) == [[0, 1], [1, 4], [4, 5]]
    assert offsets("qwen_like", "\u1112\u1161\u11ab", fast=fast) == [[0, 9]] * 3


@both_paths
def test_no_special_token_stands_around_a_text(fast: bool) -> None:
    """A closing token at (0, 0) would break monotony, and its loss leak into the last word."""
    assert library("unigram").encode("sum").offsets[-1] == (0, 0)
    assert library("llama_like").encode("sum").offsets[0] == (0, 0)
    assert offsets("unigram", "sum", fast=fast) == [[0, 3]]
    assert offsets("llama_like", "sum", fast=fast) == [[0, 0], [0, 3]]  # `▁`, not BOS
    with pytest.raises(AlignmentError, match=r"teacher offsets decrease.*special tokens"):
        align_tokens(hand_made((0, 2), (2, 3)), hand_made((0, 3), (0, 0)))


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
    reference.no_truncation()
    padded = reference.encode("sum").offsets
    assert padded[-1] == (0, 0)
    with pytest.raises(AlignmentError, match=r"student offsets decrease in document 0.*padding"):
        align_tokens(hand_made(*padded), hand_made((0, 3)))


def test_packed_or_paired_texts_are_refused() -> None:
    pair = library("qwen_like").encode("x y", "x y").offsets
    assert pair[len(pair) // 2][0] == 0
    with pytest.raises(AlignmentError, match="several texts in one document"):
        align_tokens(hand_made((0, 3)), hand_made(*pair))


def test_offsets_of_encode_batch_fast_are_refused() -> None:
    (reported,) = library("qwen_like").encode_batch_fast(["the sum"])
    assert set(reported.offsets) == {(0, 0)}
    with pytest.raises(AlignmentError, match=r"all \(0, 0\) in document 0.*encode_batch_fast"):
        align_tokens(hand_made(*reported.offsets), hand_made((0, 7)))
    with pytest.raises(AlignmentError, match=r"teacher offsets are all \(0, 0\)"):
        align_tokens(hand_made((0, 7)), hand_made(*reported.offsets))


def test_a_lone_surrogate_is_a_failed_document() -> None:
    with pytest.raises(TypeError):
        library("qwen_like").encode("a\ud800")
    surrogate = SourceDocument("bad", "a\ud800".encode("utf-8", "surrogatepass"))
    good = SourceDocument("good", b"the sum")
    batch = align_batch([surrogate, good], load("llama_like"), load("qwen_like"))
    assert [document.document_id for document in batch.documents] == ["good"]
    assert batch.failures == [(surrogate, "student: not valid UTF-8 at byte 1")]


@pytest.mark.parametrize("name", ["sentencepiece_unigram", "sentencepiece_nfkc"])
def test_sentencepiece_s_offsets_are_bytes(name: str) -> None:
    """Its normaliser rewrites `ﬁ` and drops spaces, so reported ranges are what there is."""
    text = "  ßé  ﬁ数"
    batch = load(name).tokenize_batch([text.encode()])
    spans = [text.encode()[start:end].decode() for start, end in batch.byte_offsets]
    assert "".join(dict.fromkeys(spans)).replace(" ", "") == "ßéﬁ数"
    assert batch.byte_offsets[-1].tolist() == [11, 14]
    assert not batch.tiles[0]


def test_a_dropped_character_belongs_to_no_token() -> None:
    """A byte-incomplete vocabulary leaves out what it can't spell; nothing composed it."""
    assert library("byte_incomplete").encode("xΞy").offsets == [(0, 1), (1, 2)]  # y is at 2
    assert offsets("byte_incomplete", "xΞy") == [[0, 1], [3, 4]]
    assert offsets("byte_incomplete", "x𝔘y") == [[0, 1], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert offsets("byte_incomplete", "x\x04y") == [[0, 1], [2, 3]]


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
        ("\x04", [[1, 1]]),
    ):
        batch = tokenizer.tokenize_batch([text.encode()])
        assert batch.byte_offsets.tolist() == expected, text


def test_lossy_word_pieces_leave_white_space_out() -> None:
    text = "Sum  naïve"
    batch = load("word_pieces").tokenize_batch([text.encode()])
    covered = {byte for start, end in batch.byte_offsets for byte in range(start, end)}
    assert covered == {0, 1, 2, *range(5, 11)}
    assert not batch.tiles[0]


def test_definitions_are_not_changed_by_loading() -> None:
    before = json.dumps(definition("unigram"))
    load_tokenizer(str(source("unigram")))
    assert json.dumps(definition("unigram")) == before
    assert load("unigram").file_bytes == source("unigram").read_bytes()
