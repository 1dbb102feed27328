import json
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings

from pipeline.batches import TokenBatch
from pipeline.tokenization import PROBES, Tokenizer, TokenizerError, load_tokenizer
from schemas.document import tiles_text
from tests.support.reference import piece_bytes, spelled_offsets
from tests.support.text_strategies import texts
from tests.support.token_batches import by_document, require_equal
from tests.support.tokenizer_zoo import (
    DEEPSEEK,
    EVERY,
    FAST,
    PACKAGED,
    TRAINED,
    definition,
    load,
    shared,
    source,
    write_definition,
)


def tokenize(tokenizer: Tokenizer, *strings: str) -> TokenBatch:
    return tokenizer.tokenize_batch([string.encode() for string in strings])


@pytest.mark.parametrize("name", EVERY)
@given(text=texts())
@settings(max_examples=40)
def test_offsets_are_monotone_within_the_text_and_flagged_where_they_tile_it(
    name: str, text: str
) -> None:
    batch = tokenize(load(name), text)
    data = text.encode()
    assert not batch.failures
    starts, ends = batch.byte_offsets.T
    assert np.all(starts <= ends)
    assert np.all(np.diff(starts) >= 0)
    assert np.all(np.diff(ends) >= 0)
    assert ends.max(initial=0) <= len(data)
    assert batch.tiles[0] == tiles_text(batch.byte_offsets, len(data))


@pytest.mark.parametrize("name", EVERY)
@given(text=texts())
@settings(max_examples=40)
def test_ids_are_the_library_s_own(name: str, text: str) -> None:
    library = _library(name)
    if isinstance(library, tokenizers.Tokenizer):
        for token in library.get_added_tokens_decoder().values():
            text = text.replace(token.content, "")  # what those become is other tests' matter
        expected = library.encode(text, add_special_tokens=False).ids
    else:
        expected = library.encode(text)
    assert tokenize(load(name), text).input_ids.tolist() == expected


@lru_cache(maxsize=1)
def _library(name: str) -> tokenizers.Tokenizer | sentencepiece.SentencePieceProcessor:
    data = load(name).file_bytes
    if load(name).file_name == "tokenizer.model":
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    return tokenizers.Tokenizer.from_str(data.decode())


@pytest.mark.parametrize("name", ["qwen_like", "gpt2_like", "llama_like"])
@given(text=texts())
@settings(max_examples=40)
def test_tokens_that_spell_the_text_lie_side_by_side(name: str, text: str) -> None:
    batch = tokenize(load(name), text)
    pieces = [piece_bytes(definition(name), token_id) for token_id in batch.input_ids.tolist()]
    expected = spelled_offsets(pieces, text.encode())
    if expected is not None:
        assert batch.byte_offsets.tolist() == [list(pair) for pair in expected]
        assert batch.tiles[0]


class TestFastPath:
    @pytest.mark.parametrize("name", FAST)
    @given(text=texts(40))
    @example(text="")
    @example(text=" ")
    @example(text="  <tool_call>  ")
    @settings(max_examples=60)
    def test_is_taken_and_equals_the_reference(self, name: str, text: str) -> None:
        assert load(name).fast
        require_equal(tokenize(load(name), text), tokenize(load(name, fast=False), text))

    def test_sends_only_what_it_can_not_prove_to_the_reference(self) -> None:
        tokenizer = load_tokenizer(str(source("mistral_v1")))
        tokenize(tokenizer, "plain", "café 🤗", "数学")
        assert tokenizer.num_reference_documents == 0
        batch = tokenize(tokenizer, "plain", "a <0x0A>", "数学")  # a byte's name
        assert tokenizer.num_reference_documents == 1
        assert batch.tiles.tolist() == [True, True, True]

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("qwen_like", "plain cafe\u0301 a\u0301\u0323b \u1112\u1161\u11ab \u212b"),
            ("llama_like", "plain ▁ ▁▁x"),
        ],
    )
    def test_carries_tokens_back_over_what_the_normaliser_changed(
        self, name: str, text: str
    ) -> None:
        tokenizer = load_tokenizer(str(source(name)))
        found = tokenize(tokenizer, "plain", text)
        assert tokenizer.num_reference_documents == 0
        require_equal(found, tokenize(load(name, fast=False), "plain", text))

    def test_takes_the_reference_where_tokens_spell_less_than_the_normalised_text(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = load_tokenizer(str(source("qwen_like")))
        assert tokenizer._fast is not None
        encode = tokenizer._fast.encode_batch

        def encode_stripped(texts: Sequence[str]) -> Any:
            return encode([text.strip() for text in texts])

        monkeypatch.setattr(tokenizer._fast, "encode_batch", encode_stripped)
        found = tokenize(tokenizer, "cafe\u0301 \n")
        require_equal(found, tokenize(load("qwen_like", fast=False), "cafe\u0301 \n"))
        assert tokenizer.num_reference_documents == 1

    def test_is_disabled_by_one_difference(self, caplog: pytest.LogCaptureFixture) -> None:
        tokenizer = load_tokenizer(str(source("qwen_like")))
        tokenizer._fast = load_tokenizer(str(_with_ids_swapped("qwen_like", "c", "q")))._fast
        assert tokenizer.fast
        ours = tokenize(load("qwen_like"), "abc").input_ids
        assert tokenize(tokenizer, "abc").input_ids.tolist() != ours.tolist()
        with caplog.at_level(logging.WARNING):
            tokenizer.check_fast_path([b"the theorem of the sum", b"abc"])
        assert not tokenizer.fast
        assert tokenizer.slow_reason is not None
        assert "differ from the reference" in tokenizer.slow_reason
        assert "fast path disabled" in caplog.text
        require_equal(tokenize(tokenizer, *PROBES), tokenize(load("qwen_like"), *PROBES))

    def test_check_keeps_the_count_and_tolerates_bad_utf8(self) -> None:
        tokenizer = load_tokenizer(str(source("qwen_like")))
        tokenizer.num_reference_documents = 1
        tokenizer.check_fast_path([b"fine", b"\xff", "cafe\u0301".encode()])
        assert tokenizer.fast
        assert tokenizer.num_reference_documents == 1

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("word_pieces", "do not spell the text"),
            ("llama_like", "switched off"),
            ("unigram", "fastokens library fails .*unsupported model type: Unigram"),
            ("sentencepiece_unigram", "fastokens library fails .*unsupported normalizer"),
            ("sentencepiece_nfkc", "fastokens library fails .*unsupported normalizer type: Precom"),
            shared("falcon", "unsupported pre-tokenizer type: Punctuation"),
        ],
    )
    def test_says_why_it_is_not_taken(self, name: str, reason: str) -> None:
        slow_reason = load(name, fast=reason != "switched off").slow_reason
        assert slow_reason is not None
        assert re.search(reason, slow_reason)

    @pytest.mark.parametrize(
        ("change", "text", "expected"),
        [
            ("words", "a  b", [[0, 0], [0, 1], [3, 3], [3, 4]]),
            ("removed", "x|y|z", [[0, 1], [2, 3], [4, 5]]),
            ("replace", "xabx", [[0, 1], [1, 3], [3, 4]]),
        ],
    )
    def test_lengths_that_add_up_by_chance_are_no_proof(
        self, change: str, text: str, expected: list[list[int]], tmp_path: Path
    ) -> None:
        """A space comes in before each word and another character goes."""
        write_definition(definition("gpt2_like") | _lossy_steps()[change], tmp_path)
        tokenizer = load_tokenizer(str(tmp_path))
        batch = tokenize(tokenizer, text)
        assert batch.byte_offsets.tolist() == expected
        # Found by the reference, where what became another text is in a token of its own.
        assert batch.tiles[0] == (change == "replace")


def _lossy_steps() -> dict[str, dict[str, Any]]:
    prefixing = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    removed = {"type": "Split", "pattern": {"String": "|"}, "behavior": "Removed", "invert": False}
    shorter = {"type": "Replace", "pattern": {"String": "ab"}, "content": "b"}
    return {
        "replace": {"normalizer": shorter},
        "words": {"pre_tokenizer": _sequence({"type": "WhitespaceSplit"}, prefixing)},
        "removed": {"pre_tokenizer": _sequence(removed, prefixing)},
    }


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _with_ids_swapped(name: str, first: str, second: str) -> Path:
    body = json.loads(json.dumps(definition(name)))
    vocab = body["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return write_definition(body)


class TestBatches:
    @pytest.mark.parametrize("name", EVERY)
    def test_many_documents_equal_one_by_one(self, name: str) -> None:
        tokenizer = load(name)
        strings = ["", *PROBES, "", "a", *PROBES[::-1]]
        batch = tokenize(tokenizer, *strings)
        arrays = (batch.input_ids, batch.byte_offsets, batch.cu_tokens, batch.tiles)
        assert [array.dtype for array in arrays] == [np.uint32, np.int32, np.int64, np.bool_]
        assert len(batch.input_ids) == len(batch.byte_offsets) == batch.cu_tokens[-1]
        assert batch.input_ids.max() < tokenizer.vocab_size
        assert (batch.cu_tokens[1], batch.tiles[0]) == (0, True)
        assert tokenizer.tokenize_batch([]).byte_offsets.shape == (0, 2)
        for d, (ids, ranges) in enumerate(by_document(batch)):
            single = tokenize(tokenizer, strings[d])
            np.testing.assert_array_equal(ids, single.input_ids)
            np.testing.assert_array_equal(ranges, single.byte_offsets)
            assert batch.tiles[d] == single.tiles[0]

    def test_a_text_beyond_int32_fails_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.batches.MAX_TEXT_BYTES", 4)
        batch = load("qwen_like").tokenize_batch([b"Hi", b"Hello", b"four"])
        assert batch.failures == {1: "5 bytes of text, more than 4: split it"}
        assert batch.tiles.tolist() == [True, False, True]

    @pytest.mark.parametrize("name", FAST)
    def test_what_is_not_utf8_fails_alone(self, name: str) -> None:
        tokenizer = load(name)
        lone_surrogate = "\ud800".encode("utf-8", "surrogatepass")
        data = [b"Hi", b"\xff\xfe", b"\xf0\x9f\xa4", lone_surrogate, "é".encode(), b"ab\xc0\x80"]
        batch = tokenizer.tokenize_batch(data)
        assert batch.failures == {
            1: "not valid UTF-8 at byte 0",
            2: "not valid UTF-8 at byte 0",
            3: "not valid UTF-8 at byte 0",
            5: "not valid UTF-8 at byte 2",
        }
        assert np.diff(batch.cu_tokens)[[1, 2, 3, 5]].tolist() == [0, 0, 0, 0]
        assert batch.tiles.tolist() == [True, False, False, False, True, False]
        expected = tokenizer.tokenize_batch([b"Hi", "é".encode()])
        np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
        np.testing.assert_array_equal(batch.byte_offsets, expected.byte_offsets)


class TestSpecialStrings:
    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("fast", [True, False])
    def test_no_text_forges_a_control_token(self, name: str, fast: bool) -> None:
        tokenizer = load(name, fast=fast)
        control = _control_ids(tokenizer)
        strings = list(control)
        assert strings
        batch = tokenize(tokenizer, *strings, *(f"a {s} b{s}" for s in strings), "".join(strings))
        assert not batch.failures
        forged = set(control.values()) & set(batch.input_ids.tolist())
        assert forged <= {_unknown_id(tokenizer)}

    @pytest.mark.parametrize("name", TRAINED)
    def test_honoured_on_request(self, name: str) -> None:
        tokenizer = load(name, special_strings="honoured")
        control = _control_ids(tokenizer)
        batch = tokenize(tokenizer, *(f"a{string}b" for string in control))
        assert control
        for (string, token_id), (ids, ranges) in zip(
            control.items(), by_document(batch), strict=True
        ):
            place = ids.tolist().index(token_id)
            assert ranges[place].tolist() == [1, 1 + len(string.encode())]

    @pytest.mark.parametrize(
        "name", ["qwen_like", DEEPSEEK, *map(shared, ("qwen2_5", "deepseek_llm", "smollm2"))]
    )
    @pytest.mark.parametrize("fast", [True, False])
    def test_other_added_tokens_keep_their_ids(self, name: str, fast: bool) -> None:
        tokenizer = load(name, fast=fast)
        control = _control_ids(tokenizer)
        added = json.loads(tokenizer.file_bytes)["added_tokens"]
        ordinary = {t["content"]: t["id"] for t in added if t["content"] not in control}
        for content, token_id in ordinary.items():
            batch = tokenize(tokenizer, f"{content}")
            assert batch.input_ids.tolist() == [token_id], content
            assert batch.byte_offsets.tolist() == [[0, len(content.encode())]]
        assert ordinary or name == "smollm2"

    def test_are_refused_for_a_sentencepiece_model(self) -> None:
        with pytest.raises(TokenizerError, match=r"never reads special strings.*tokenizer\.json"):
            load_tokenizer(str(PACKAGED["mistral_v1"]), special_strings="honoured")

    def test_take_no_other_value(self) -> None:
        with pytest.raises(TokenizerError, match='"ignored" is unknown; use "plain" or "honoured"'):
            load_tokenizer(str(source("qwen_like")), special_strings="ignored")  # type: ignore[arg-type]

    def test_an_added_token_that_swallows_space_covers_it(self, tmp_path: Path) -> None:
        body = json.loads(json.dumps(definition("llama_like")))
        body["added_tokens"][1] |= {"lstrip": True, "rstrip": True}
        write_definition(body, tmp_path)
        batch = tokenize(load_tokenizer(str(tmp_path), special_strings="honoured"), "ab  <s> cd")
        place = batch.input_ids.tolist().index(1)
        assert batch.byte_offsets[place].tolist() == [2, 8]
        assert batch.tiles[0]


def _control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    if tokenizer.file_name == "tokenizer.model":
        return {"<s>": 1, "</s>": 2}
    added = json.loads(tokenizer.file_bytes)["added_tokens"]
    return {
        token["content"]: token["id"]
        for token in added
        if token["special"] or token["content"].startswith("<|") or "｜" in token["content"]
    }


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    """The model itself may give the unknown token, where a text holds what it does not know."""
    if tokenizer.file_name == "tokenizer.model":
        return 0
    model = json.loads(tokenizer.file_bytes)["model"]
    return model["unk_id"] if "unk_id" in model else model["vocab"].get(model.get("unk_token"))


class TestVocabulary:
    @pytest.mark.parametrize("name", [name for name in FAST if name != "byte_incomplete"])
    def test_token_bytes_spell_the_text(self, name: str) -> None:
        tokenizer = load(name)
        ids = tokenize(tokenizer, "Natalia sold 48 clips, 🤗é.").input_ids.tolist()
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        assert spelled.removeprefix(b" ") == "Natalia sold 48 clips, 🤗é.".encode()

    def test_token_bytes_are_empty_where_unknown(self) -> None:
        tokenizer = load("llama_like")
        assert [tokenizer.token_bytes(token_id) for token_id in (0, 1, 2)] == [b"", b"", b""]
        assert tokenizer.token_bytes(3) == b"\x00"
        assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
        assert tokenizer.token_bytes(-1) == b""
        assert load("word_pieces").token_bytes(20) == b""

    @pytest.mark.parametrize("name", ["sentencepiece_suffix", "sentencepiece_bpe", "llama_like"])
    @pytest.mark.parametrize("text", ["the sum of x", "x", "sum "])
    def test_tokens_that_tile_a_text_spell_it(self, name: str, text: str) -> None:
        batch = tokenize(load(name), text)
        size = len(text.encode())
        assert batch.tiles[0]
        assert load(name).spell_text(batch.input_ids, batch.byte_offsets, size) == text.encode()

    def test_base_vocabulary_leaves_added_tokens_out(self) -> None:
        base = load("qwen_like").base_vocabulary()
        assert base["Ġthe"] == b" the"
        assert not {"<|endoftext|>", "<tool_call>"} & set(base)
        assert load("qwen_like").vocab_size == len(base) + 4

    @pytest.mark.parametrize(
        ("name", "bos", "eos", "adds_bos", "adds_eos"),
        [
            ("qwen_like", None, "<|endoftext|>", False, False),
            ("gpt2_like", None, "<|endoftext|>", False, False),
            ("llama_like", "<s>", "</s>", True, False),
            ("unigram", "<s>", "</s>", False, True),
            ("word_pieces", "[CLS]", "[SEP]", True, True),
            ("mistral_v1", "<s>", "</s>", True, False),
            pytest.param(
                *("deepseek", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", True, False),
                marks=pytest.mark.slow,
            ),
            shared("llama2", "<s>", "</s>", True, False),
            shared("qwen2_5", None, "<|endoftext|>", False, False),
            shared("deepseek_llm", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", True, False),
            shared("smollm2", None, "<|endoftext|>", False, False),
        ],
    )
    def test_conventions(
        self, name: str, bos: str | None, eos: str | None, adds_bos: bool, adds_eos: bool
    ) -> None:
        tokenizer = load(name)
        assert tokenizer.bos_token_id == (None if bos is None else tokenizer.find_token(bos))
        assert tokenizer.eos_token_id == (None if eos is None else tokenizer.find_token(eos))
        assert (tokenizer.adds_bos, tokenizer.adds_eos) == (adds_bos, adds_eos)
