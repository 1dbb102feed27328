"""Added tokens stand for what the library finds in a text, whatever their flags."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from pipeline.tokenization import Tokenizer, TokenizerError, load_tokenizer
from tests.support.token_batches import by_document
from tests.support.tokenizer_zoo import (
    Definition,
    definition,
    load,
    shared,
    with_added,
    write_definition,
)

LOWER_CASE = {"normalizer": {"type": "Lowercase"}}
PREFIXING = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
MISTRAL_LIKE = {"normalizer": None, "pre_tokenizer": PREFIXING}
TEXTS = ("say hello to", "hello", "xhello", " hello hello", "Hello<s> hello", "é hello\n", "HELLO")


def load_body(body: Definition, *, fast: bool = False, honoured: bool = True) -> Tokenizer:
    path = str(write_definition(body))
    strings: Any = "honoured" if honoured else "plain"
    return load_tokenizer(path, fast=fast, special_strings=strings)


def library_ids(body: Definition, text: str) -> list[int]:
    library = tokenizers.Tokenizer.from_str(json.dumps(body))
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama_like", {}),
        ("llama_like", MISTRAL_LIKE),
        ("qwen_like", {}),
        ("gpt2_like", {}),
        ("qwen_like", LOWER_CASE),
        ("unigram", {}),
        ("xlm_roberta_like", {}),
        ("word_pieces", {}),
        ("clip_like", {}),
    ],
)
@pytest.mark.parametrize("flags", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}])
@pytest.mark.parametrize("normalized", [True, False])
def test_every_family(
    name: str, change: Definition, flags: dict[str, bool], normalized: bool
) -> None:
    body = with_added(
        definition(name) | change, AddedToken("hello", normalized=normalized, **flags)
    )
    tokenizer = load_body(body)
    batch = tokenizer.tokenize_batch([text.encode() for text in TEXTS])
    assert not batch.failures
    added = body["added_tokens"][-1]["id"]
    found = 0
    for text, (ids, ranges) in zip(TEXTS, by_document(batch), strict=True):
        assert ids.tolist() == library_ids(body, text)
        assert tokenizer.find_unproven(ids, ranges, text.encode()) == []
        for start, end in ranges[ids == added].tolist():
            assert text.encode()[start:end].strip().lower() == b"hello"
            found += 1
    assert found >= 3


@pytest.mark.parametrize(("name", "change"), [("word_pieces", {}), ("qwen_like", LOWER_CASE)])
def test_an_uncased_word(name: str, change: Definition) -> None:
    token, raw = AddedToken("Hello"), AddedToken("RAW", normalized=False)
    body = with_added(definition(name) | change, token, raw)
    text = "a HELLO hello RAW raw"
    batch = load_body(body).tokenize_batch([text.encode()])
    assert not batch.failures
    assert batch.input_ids.tolist() == library_ids(body, text)
    hello, raw_id = (token["id"] for token in body["added_tokens"][-2:])
    assert batch.byte_offsets[batch.input_ids == hello].tolist() == [[2, 7], [8, 13]]
    assert batch.byte_offsets[batch.input_ids == raw_id].tolist() == [[14, 17]]


def test_white_space_that_two_added_tokens_claim_is_both_s() -> None:
    """The library's own ranges decrease: `<r>` takes the spaces, and each is found once more."""
    body = with_added(definition("qwen_like"), AddedToken("<r>", rstrip=True), AddedToken(" "))
    batch = load_body(body).tokenize_batch([b"a<r>  b"])
    assert not batch.failures
    assert batch.input_ids.tolist() == library_ids(body, "a<r>  b")
    assert batch.byte_offsets.tolist() == [[0, 1], [1, 6], [4, 6], [5, 6], [6, 7]]


@pytest.mark.parametrize("fast", [True, False])
def test_a_run_of_space_pieces_is_an_added_token_too(fast: bool) -> None:
    """As in Gemma's file: one id for two spaces and for the string `▁▁`."""
    body = json.loads(json.dumps(definition("llama_like")))
    body["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    vocabulary, merges = body["model"]["vocab"], body["model"]["merges"]
    vocabulary["▁▁"] = len(vocabulary)
    merges.insert(0, ["▁", "▁"])
    body = with_added(body, AddedToken("▁▁", normalized=False))
    assert body["added_tokens"][-1]["id"] == vocabulary["▁▁"]
    tokenizer = load_body(body, fast=fast)
    assert tokenizer.fast == fast
    assert tokenizer.token_bytes(vocabulary["▁▁"]) == b"  "
    for text, place in (("1  2", [1, 3]), ("1▁▁2", [1, 7])):
        batch = tokenizer.tokenize_batch([text.encode()])
        assert not batch.failures
        assert batch.input_ids.tolist() == library_ids(body, text)
        assert batch.byte_offsets[batch.input_ids == vocabulary["▁▁"]].tolist() == [place]


def test_an_added_token_with_the_id_of_a_byte_is_neither() -> None:
    """`é` is how byte-level BPE writes 0xE9, with which 飾 begins."""
    body = with_added(definition("qwen_like"), AddedToken("é"))
    byte = body["model"]["vocab"]["é"]
    assert body["added_tokens"][0]["id"] == byte
    tokenizer = load_body(body)
    assert tokenizer.token_bytes(byte) == b""
    for text, place in (("xé", [1, 3]), ("飾x", [0, 3])):
        batch = tokenizer.tokenize_batch([text.encode()])
        assert not batch.failures
        assert batch.byte_offsets[batch.input_ids == byte].tolist() == [place]


def test_two_of_one_normal_form_are_refused() -> None:
    """The library takes either of them, another one at each load."""
    body = with_added(definition("lower_case"), AddedToken("Foo"), AddedToken("FOO"))
    with pytest.raises(TokenizerError, match=r"'Foo' and 'FOO' are both 'foo' when normalised"):
        load_body(body)
    body["added_tokens"][-1]["normalized"] = False
    batch = load_body(body).tokenize_batch([b"Foo FOO"])
    assert batch.input_ids.tolist() == library_ids(body, "Foo FOO")


def test_white_space_that_takes_more_is_refused() -> None:
    """The library's memory grows with the square of a run of white space."""
    added = AddedToken("  ", rstrip=True, normalized=False)
    body = with_added(definition("strip_accents"), added)
    with pytest.raises(TokenizerError, match=r'white space .* set its "rstrip" to'):
        load_body(body)
    body["added_tokens"][-1]["rstrip"] = False
    assert load_body(body).tokenize_batch([b"a  b"]).input_ids.tolist() == library_ids(body, "a  b")


def test_white_space_left_out_and_a_space_put_before_what_is_new() -> None:
    """T5 and XLNet split at white space, and what the charsmap rewrites is widened over it."""
    body = json.loads(json.dumps(definition("xlm_roberta_like")))
    splits = [{"type": "WhitespaceSplit"}, body["pre_tokenizer"]]
    body["normalizer"] = body["normalizer"]["normalizers"][0]
    body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits}
    text = "\x7fa  the\t\U00025c10x"
    batch = load_body(body).tokenize_batch([text.encode()])
    assert not batch.failures
    assert batch.input_ids.tolist() == library_ids(body, text)


def test_an_added_token_that_becomes_a_space_is_no_dummy_prefix() -> None:
    """`▁x` gets a space of its own, and what is left of the white space is the added token's."""
    body = with_added(definition("xlm_roberta_like"), AddedToken("\n\n"))
    batch = load_body(body).tokenize_batch([b"\n\n x"])
    assert batch.input_ids.tolist() == library_ids(body, "\n\n x")
    assert batch.byte_offsets.tolist()[0] == [0, 3]


def test_a_space_put_behind_an_added_token_amid_a_rewritten_character_is_refused() -> None:
    """`½` becomes `1⁄2`, and ` ⁄2` behind the added token: not what the text's bytes hold."""
    change = {"normalizer": {"type": "NFKD"}}
    body = with_added(definition("gpt2_like") | change, AddedToken("1", normalized=True))
    batch = load_body(body).tokenize_batch(["½".encode()])
    assert "stand for different text" in batch.failures[0]


def test_refusals_name_control_tokens_as_the_file_does() -> None:
    body = with_added(definition("qwen_like"), AddedToken("<pad>", special=True))
    body["added_tokens"][-1]["id"] += 5
    with pytest.raises(TokenizerError, match=r"added token '<pad>' has id 429 in .* gives it 424;"):
        load_body(body, honoured=False)


@pytest.mark.parametrize("join", [list, " ".join])
def test_merges_that_make_a_control_token_are_no_text_s(join: Callable[[Any], Any]) -> None:
    """Converters list every pair that makes a piece, those of `<s>` among them."""
    body = json.loads(json.dumps(definition("llama_like")))
    vocabulary, merges = body["model"]["vocab"], body["model"]["merges"]
    vocabulary |= {piece: len(vocabulary) + place for place, piece in enumerate(("<", ">", "<s"))}
    body["model"]["merges"] = [join(merge) for merge in [*merges, ("<", "s"), ("<s", ">")]]
    plain = load_body(body, honoured=False).tokenize_batch([b"x<s>"]).input_ids.tolist()
    assert plain[-2:] == [vocabulary["<s"], vocabulary[">"]]
    assert load_body(body).tokenize_batch([b"x<s>"]).input_ids.tolist()[-1] == vocabulary["<s>"]


def test_an_honoured_control_string_begins_a_text_anew() -> None:
    """So what is found behind it may differ; both are what the library itself gives."""
    body = with_added(definition("llama_like"), AddedToken("\u3000"))
    text = "<s>\u3000b"
    library = tokenizers.Tokenizer.from_str(json.dumps(body))
    honoured = load_body(body).tokenize_batch([text.encode()]).input_ids.tolist()
    assert honoured == library.encode(text, add_special_tokens=False).ids
    library.encode_special_tokens = True
    plain = load_body(body, honoured=False).tokenize_batch([text.encode()]).input_ids.tolist()
    assert plain == library.encode(text, add_special_tokens=False).ids
    added = body["added_tokens"][-1]["id"]
    assert added in honoured, "behind <s> comes ▁\u3000, its normal form"
    assert added not in plain, "within a text there is no ▁ before it"


@pytest.mark.parametrize("name", [shared("gemma1"), shared("gemma3")])
def test_gemma(name: str) -> None:
    tokenizer = load(name)
    assert tokenizer.fast
    texts = ["a  b", "x ▁▁▁ y", "   def f():\n\n\n        return", "", "é  數 <table>  ▁"]
    batch = tokenizer.tokenize_batch([text.encode() for text in texts])
    assert not batch.failures
    library = tokenizers.Tokenizer.from_str(tokenizer.file_bytes.decode())
    for text, (ids, ranges) in zip(texts, by_document(batch), strict=True):
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.find_unproven(ids, ranges, text.encode()) == []


def test_a_token_that_is_nothing_when_normalised_is_refused() -> None:
    stripped = definition("qwen_like") | {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}],
        }
    }
    accent = "\u0301"
    with pytest.raises(
        TokenizerError, match=r'is nothing when normalised.* set its "normalized" to'
    ):
        load_body(with_added(stripped, AddedToken(accent, normalized=True)))
    kept = with_added(stripped, AddedToken(accent, normalized=False))
    assert library_ids(kept, f"e{accent}")
    load_body(kept)
