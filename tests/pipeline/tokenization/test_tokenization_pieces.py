from collections.abc import Sequence
from itertools import cycle, islice
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batches import TokenBatch
from pipeline.tokenization import pieces as tokenization_pieces
from pipeline.tokenization.pieces import tokenize_in_pieces
from tests.support.text_strategies import texts
from tests.support.token_batches import require_equal
from tests.support.tokenizer_zoo import SENTENCES, SMALL, load

LONG = (" ".join(SENTENCES) + "\n") * 12


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joints every few hundred bytes instead of every quarter of a mebibyte."""
    monkeypatch.setattr(tokenization_pieces, "PIECE_BYTES", 1200)
    monkeypatch.setattr(tokenization_pieces, "OVERLAP_BYTES", 600)
    monkeypatch.setattr(tokenization_pieces, "LONGEST_PIECE_BYTES", 4800)
    monkeypatch.setattr(tokenization_pieces, "AGREEING_TOKENS", 16)


@pytest.mark.parametrize("name", SMALL)
@given(strings=st.lists(texts(), min_size=1, max_size=4), place=st.integers(0, 2000))
@settings(max_examples=12, deadline=None)
def test_pieces_give_the_tokens_of_the_whole(name: str, strings: list[str], place: int) -> None:
    text = LONG[:place] + " ".join(islice(cycle(strings), 40)) + LONG[place:]
    tokenizer = load(name, fast=False)
    calls = []

    def tokenize(pieces: Sequence[bytes]) -> TokenBatch:
        calls.append(pieces)
        return tokenizer.tokenize_batch(pieces)

    found = tokenize_in_pieces(text.encode(), tokenize)
    assert len(calls) > 3
    if found.failures:
        return
    expected = tokenizer.tokenize_batch([text.encode()])
    if tokenizer.file_name == "tokenizer.json":
        require_equal(found, expected)
    else:  # where such a normaliser drops characters among spaces, either may be wider
        np.testing.assert_array_equal(found.input_ids, expected.input_ids)
        assert tokenizer.find_unproven(found.input_ids, found.byte_offsets, text.encode()) == []


@pytest.mark.parametrize("name", SMALL)
def test_ordinary_texts_can_be_joined(name: str) -> None:
    tokenizer = load(name, fast=False)
    text = (LONG + "cafe\u0301 " + LONG).encode()
    require_equal(
        tokenize_in_pieces(text, tokenizer.tokenize_batch), tokenizer.tokenize_batch([text])
    )


def test_a_text_without_joints_is_refused() -> None:
    """As with an endless run of letters, tokens depend on where a piece begins."""
    tokenizer = load("gpt2_like", fast=False)

    def tokenize(pieces: Sequence[bytes]) -> TokenBatch:
        batch = tokenizer.tokenize_batch(pieces)
        batch.input_ids[:] += crc32(pieces[0]) % 1000
        return batch

    found = tokenize_in_pieces(LONG.encode(), tokenize)
    assert "can't take in pieces" in found.failures[0]
    assert "split the document" in found.failures[0]
    assert len(found.input_ids) == 0


def test_a_piece_that_fails_fails_the_document() -> None:
    tokenizer = load("gpt2_like", fast=False)

    def tokenize(pieces: Sequence[bytes]) -> TokenBatch:
        batch = tokenizer.tokenize_batch(pieces)
        if b"LAST" not in pieces[0]:
            return batch
        nothing = (batch.input_ids[:0], batch.byte_offsets[:0], np.zeros(2, np.int64))
        return TokenBatch(*nothing, batch.tiles, {0: "no reason"})

    found = tokenize_in_pieces(LONG.encode() + b"LAST", tokenize)
    assert found.failures == {0: "no reason"}


def test_a_tokenizer_takes_long_documents_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (LONG * 3 + "e\u0301 " + LONG * 3).encode()
    tokenizer = load("qwen_like")
    before = tokenizer.num_reference_documents
    expected = tokenizer.tokenize_batch([b"short", text, "e\u0301".encode()])
    monkeypatch.setattr("pipeline.tokenization.tokenizer.LONG_TEXT_BYTES", 2000)
    monkeypatch.setattr("pipeline.tokenization.pieces.LONG_TEXT_BYTES", 2000)
    found = tokenizer.tokenize_batch([b"short", text, "e\u0301".encode()])
    require_equal(found, expected)
    assert tokenizer.num_reference_documents == before + 1
