"""What the fast encoder is given, so that it does what the tokenizer's file says."""

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.tokenization import Tokenizer, load_tokenizer
from pipeline.tokenization.backends import UNLIKE
from tests.support.text_strategies import texts
from tests.support.token_batches import require_equal
from tests.support.tokenizer_zoo import definition, load, needs_shared, source, write_definition


def both(path: Path) -> tuple[Tokenizer, Tokenizer]:
    return load_tokenizer(str(path)), load_tokenizer(str(path), fast=False)


def metaspace(**step: Any) -> dict[str, Any]:
    steps = {"type": "Metaspace", "replacement": "▁", **step}
    return definition("llama_like") | {"normalizer": None, "pre_tokenizer": steps}


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    steps = {
        "always": metaspace(prepend_scheme="always", split=False),
        "first": metaspace(prepend_scheme="first", split=False),
        "never": metaspace(prepend_scheme="never", split=True),
        "words": metaspace(add_prefix_space=True),
    }
    return {
        name: both(write_definition(body, tmp_path_factory.mktemp(name)))
        for name, body in steps.items()
    }


@pytest.mark.parametrize("name", ["always", "first", "never", "words"])
@given(text=texts(30))
@example(text="")
@example(text=" a  b")
@example(text="a\n▁b\n c ")
@settings(max_examples=80, deadline=None)
def test_metaspace_by_other_steps(
    spaced: dict[str, tuple[Tokenizer, Tokenizer]], name: str, text: str
) -> None:
    fast, slow = spaced[name]
    assert fast.fast
    require_equal(*(each.tokenize_batch([text.encode()]) for each in (fast, slow)))


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("fuse_unk", [True, False])
def test_a_piece_with_a_character_that_is_none_is_never_made(
    byte_fallback: bool, fuse_unk: bool, tmp_path: Path
) -> None:
    """As in a pruned vocabulary, or one with names of bytes but without byte fallback."""
    body = copy.deepcopy(definition("llama_like"))
    body["model"] |= {"byte_fallback": byte_fallback, "fuse_unk": fuse_unk}
    pieces = body["model"]["vocab"]
    pieces["▁sumЖ"] = max(pieces.values()) + 1
    fast, slow = both(write_definition(body, tmp_path))
    assert fast.fast
    texts = [text.encode() for text in ("sumЖ", "sumЖsum", "sum", "Ж<0xE2>")]
    require_equal(fast.tokenize_batch(texts), slow.tokenize_batch(texts))
    assert fast.num_reference_documents == 3, "all but the plain one"


HONOURED = st.lists(
    st.one_of(st.sampled_from(("<s>", "</s>", "<s>[INST] ", " ", "\n")), texts(4)), max_size=8
).map("".join)


@needs_shared
@pytest.mark.parametrize("name", ["llama2", "mistral", "llama_like"])
@given(text=HONOURED)
@example(text="<s>[INST] sum [/INST] the</s><s>[INST]  9\n[/INST]\nsum </s>")
@example(text=" <s> <s></s>")
@settings(max_examples=60, deadline=None)
def test_chats_of_llama_2_take_the_fast_path(name: str, text: str) -> None:
    """A space is put after each `<s>`: ids are the library's, places proven without its report."""
    fast, slow = (load(name, special_strings="honoured", fast=fast) for fast in (True, False))
    assert fast.fast
    before = fast.num_reference_documents
    found, expected = (each.tokenize_batch([text.encode()]) for each in (fast, slow))
    left_out = any(string in text for string in ("<0x", "<unk>", "▁", *UNLIKE))
    assert (fast.num_reference_documents > before) <= left_out
    ids = _library(name).encode(text, add_special_tokens=False).ids
    assert found.input_ids.tolist() == expected.input_ids.tolist() == ids
    assert found.byte_offsets.tolist() == expected.byte_offsets.tolist()
    assert not fast.find_unproven(found.input_ids, found.byte_offsets, text.encode())


@lru_cache(maxsize=1)
def _library(name: str) -> tokenizers.Tokenizer:
    file_bytes = load(name, special_strings="honoured").file_bytes
    return tokenizers.Tokenizer.from_str(file_bytes.decode())


def test_ids_with_gaps_and_an_empty_piece(tmp_path: Path) -> None:
    body = definition("gpt2_like")
    vocab = {**body["model"]["vocab"], "": 500, "zqx": 502}
    changed = body | {"model": body["model"] | {"vocab": vocab}, "added_tokens": []}
    fast, slow = both(write_definition(changed, tmp_path))
    assert fast.fast
    require_equal(*(each.tokenize_batch([b"the zqx theorem"]) for each in (fast, slow)))


def test_what_the_vocabulary_lacks_is_left_to_the_reference() -> None:
    tokenizer = load_tokenizer(str(source("byte_incomplete")))
    assert tokenizer.fast
    texts = [b"plain", "x\u039ey".encode(), b"more", "\u039e".encode()]
    batch = tokenizer.tokenize_batch(texts)
    assert tokenizer.num_reference_documents == 2
    require_equal(batch, load("byte_incomplete", fast=False).tokenize_batch(texts))


def test_a_token_over_a_byte_that_the_vocabulary_lacks_is_proven() -> None:
    """Nobody has the first byte of the first of two characters, one token that of the second."""
    tokenizer, text = load("byte_incomplete"), "\U000113a7\U000113a7".encode()
    batch = tokenizer.tokenize_batch([text])
    assert [3, 6] in batch.byte_offsets.tolist()
    assert tokenizer.find_unproven(batch.input_ids, batch.byte_offsets, text) == []
    other = batch.input_ids.copy()
    other[0] += 1
    assert tokenizer.find_unproven(other, batch.byte_offsets, text) != []


def test_user_defined_pieces_of_sentencepiece() -> None:
    name = "mistral_instruct_tokenizer_241114.model.v7"
    tokenizer = load_tokenizer(str(source(name)))
    assert tokenizer.fast
    texts = [b"plain text", b"[/REF] x[/REF]y"]
    batch = tokenizer.tokenize_batch(texts)
    assert tokenizer.num_reference_documents == 1
    require_equal(batch, load(name, fast=False).tokenize_batch(texts))


@pytest.mark.slow
def test_long_runs_are_read_as_the_reference_does() -> None:
    """A library that divides long texts among threads may cut a run."""
    tokenizer = load("deepseek")
    for piece in ("a", " ", "\n", "é", "字", "=", "1", " \n"):
        text = ("x = 3\n" + piece * (300_000 // len(piece.encode())) + "end").encode()
        assert tokenizer._fast is not None
        ids, _, _ = tokenizer._fast.encode_batch([text.decode()])
        (expected,) = tokenizer._reference.encode_batch([text.decode()])
        assert ids.tolist() == expected.ids.tolist(), piece


def test_added_tokens_of_single_words_go_to_the_reference() -> None:
    body = copy.deepcopy(definition("llama_like"))
    body["added_tokens"].append(
        {
            **{"id": 600, "content": "cat", "single_word": True, "lstrip": False},
            **{"rstrip": False, "normalized": False, "special": False},
        }
    )
    path = str(write_definition(body))
    tokenizer, expected = load_tokenizer(path), load_tokenizer(path, fast=False)
    assert "single words" in str(tokenizer.slow_reason)
    texts = ["学cat".encode(), b"a cat"]
    require_equal(tokenizer.tokenize_batch(texts), expected.tokenize_batch(texts))
