"""Offsets behind a normaliser, against an oracle that follows it character by character."""

import re
import time
import unicodedata
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.tokenization import Tokenizer
from pipeline.tokenization.normalization import follow_normalizer
from pipeline.tokenization.offset_proof import find_unproven
from pipeline.tokenization.reference import words_around
from tests.support.normalizer_oracle import (
    Step,
    cluster_hull,
    compose,
    decompose,
    lower,
    one_space,
    token_sources,
    trace,
    without_accents,
    without_marks,
)
from tests.support.range_oracle import bound_ranges
from tests.support.tokenizer_zoo import NORMALIZING, TRAINED_SENTENCEPIECE, load

ARABIC = "\u0634\u0651\u064e"
KOREAN = unicodedata.normalize("NFD", "를 위한 유효한")
STEPS: dict[str, list[Step]] = {
    "nfc": [compose("NFC")],
    "nfd": [decompose("NFD")],
    "nfkc": [compose("NFKC")],
    "nfkd": [decompose("NFKD")],
    "lower_case": [compose("NFC"), lower],
    "strip_accents": [decompose("NFD"), without_marks],
    "clip_like": [compose("NFC"), one_space, lower],
    "word_pieces": [decompose("NFD"), without_accents, lower],
}
FORMS = [name for name in STEPS if name != "word_pieces"]
MARKED = (
    *("\u0634\u0644\u0627\u0622", "\u0651\u064e\u0650\u064b\u0654\u0653"),  # Arabic
    *("\u1000\u1019\u103a\u102c\u1031", "\u1037\u103a\u1039\u103d"),  # Burmese
    *("\u05e9\u05d1\u05d5", "\u05b0\u05b8\u05bc\u05c1\u05c2"),  # Hebrew
    *("aeoAEuâơ", "\u0301\u0323\u0309\u0302\u031b"),  # Vietnamese
    *("\u1112\u1105\u110b", "\u1161\u1175\u1173", "\u11ab\u11af"),  # Korean
    *("ﬁ½①㌔℃ｶ", "\uff9e\u0345", "İẞΣǅ\u1e9b\u2126", "\u0958\u0344\u0f71\u0f72\u0f73"),
    *("the sum", " \t\n", "🤗x9.", "数学"),
)


def marked_texts() -> st.SearchStrategy[str]:
    """Texts in which every second character may be a mark, in scripts that are full of them."""
    characters = st.sampled_from(MARKED).flatmap(st.sampled_from)
    return st.text(characters, max_size=24)


def blank_texts() -> st.SearchStrategy[str]:
    """Texts with much that becomes white space or nothing, next to what is rewritten otherwise."""
    blanks = " \t\n\ufffd\ufeff\u200b\u3000\xa0\x01\x7f\u2028\u1680"
    characters = st.sampled_from((blanks, blanks, "´¨ﷺ", "⅔⁄½①㌔ﬁ", *MARKED))
    return st.text(characters.flatmap(st.sampled_from), max_size=16)


def collapse(text: str) -> str:
    """What SentencePiece's nmt_nfkc does to white space and U+FFFD."""
    return re.sub("[ \ufffd]+", " ", text)


def stands_for(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token stands for in the normalised text."""
    entry: bytes = tokenizer._reference_path.contents.entries[token_id]
    return entry


@pytest.mark.parametrize("name", FORMS)
@given(text=marked_texts())
@example(text=ARABIC)
@example(text=KOREAN)
@example(text="cafe\u0301 au lait")
@example(text="a\u0301\u0323 \u0301")
@settings(max_examples=150)
def test_each_token_covers_the_characters_that_it_came_from_and_no_others(
    name: str, text: str
) -> None:
    tokenizer = load(name, fast=False)
    batch = tokenizer.tokenize_batch([text.encode()])
    assert not batch.failures
    pieces = [stands_for(tokenizer, token_id) for token_id in batch.input_ids.tolist()]
    if not all(pieces):
        return  # the unknown token
    sources = token_sources(pieces, trace(text, STEPS[name]), text)
    for (start, end), own in zip(batch.byte_offsets.tolist(), sources, strict=True):
        assert own <= set(range(start, end))
        if own:
            first, last = cluster_hull(text, own)
            assert first <= start
            assert end <= last


@pytest.mark.parametrize("name", [*TRAINED_SENTENCEPIECE, "unigram", "nfkc"])
@given(text=blank_texts())
@example(text="⅔ x⁄")
@example(text="bad \ufffd\ufffd bytes \ufffd")
@example(text="t\ufeff\ufeff")
@example(text="a ´ ´b")
@example(text="plain words " * 45 + "\ufffd ´x \ufffdy \ufeff" * 3)
@settings(max_examples=100)
def test_ranges_lie_between_those_that_trying_every_cut_gives(name: str, text: str) -> None:
    tokenizer = load(name, fast=False)
    data = text.encode()
    batch = tokenizer.tokenize_batch([data])
    assert not batch.failures
    assert tokenizer.find_unproven(batch.input_ids, batch.byte_offsets, data) == []
    (encoded,) = tokenizer._reference.encode_batch([text])
    surfaces = encoded.report().surfaces
    pieces = [
        stands_for(tokenizer, i) or s for i, s in zip(encoded.ids.tolist(), surfaces, strict=True)
    ]
    bounds = bound_ranges(text, pieces, tokenizer._reference.normalize)
    if bounds is None:
        return
    for (start, end), (own, (first, last)) in zip(batch.byte_offsets.tolist(), bounds, strict=True):
        assert own <= set(range(start, end))
        assert first <= start <= end <= last


@pytest.mark.parametrize("name", [*NORMALIZING, "word_pieces", "sentencepiece_nfkc"])
@pytest.mark.parametrize("text", ["cafe\u0301 au lait", "Cafe\u0301\u0323 au", "xe\u0301"])
def test_no_accent_is_left_unmapped(name: str, text: str) -> None:
    data = text.encode()
    batch = load(name, fast=False).tokenize_batch([data])
    covered = {byte for start, end in batch.byte_offsets for byte in range(start, end)}
    assert {place for place, byte in enumerate(data) if byte != 0x20} <= covered


@pytest.mark.parametrize("name", [*FORMS, "word_pieces", "sentencepiece_nfkc", "llama_like"])
@given(text=marked_texts())
@example(text=ARABIC)
@settings(max_examples=60)
def test_what_is_found_is_proven_by_content(name: str, text: str) -> None:
    tokenizer = load(name, fast=False)
    batch = tokenizer.tokenize_batch([text.encode()])
    assert not batch.failures
    assert tokenizer.find_unproven(batch.input_ids, batch.byte_offsets, text.encode()) == []


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@given(text=marked_texts())
@settings(max_examples=100)
def test_a_rewriting_gives_the_whole_and_is_the_same_between_its_changes(
    form: str, text: str
) -> None:
    rewriting = follow_normalizer(text, partial(unicodedata.normalize, form))
    assert rewriting is not None
    data, normalized = text.encode(), rewriting.normalized
    assert normalized.decode() == unicodedata.normalize(form, text)
    position = place = 0
    for text_start, text_end, start, end in rewriting.changes.tolist():
        assert data[position:text_start] == normalized[place:start]
        assert data[text_start:text_end] != normalized[start:end]
        position, place = text_end, end
    assert data[position:] == normalized[place:]


def test_long_texts_are_followed_piece_by_piece() -> None:
    nfc = partial(unicodedata.normalize, "NFC")
    text = ("plain words " * 300 + "e\u0301 ") * 20
    rewriting = follow_normalizer(text, nfc)
    assert rewriting is not None
    assert len(rewriting.changes) == 20
    assert rewriting.normalized.decode() == nfc(text)


@pytest.mark.parametrize("between", ["\ufffd", " \ufffd", "\ufffd \ufffd"])
def test_white_space_that_becomes_one_is_followed_where_blocks_meet(between: str) -> None:
    text = ("word " * 103 + between) * 10 + "x"
    rewriting = follow_normalizer(text, collapse)
    assert rewriting is not None
    assert rewriting.normalized.decode() == collapse(text)
    assert max(rewriting.changes[:, 1] - rewriting.changes[:, 0]) == len(f" {between}".encode())


def test_a_run_of_blanks_takes_time_as_its_length() -> None:
    def seconds(length: int) -> float:
        start = time.process_time()
        rewriting = follow_normalizer("a" + " " * length + "b", collapse)
        assert rewriting is not None
        assert rewriting.changes.tolist() == [[1, length + 1, 1, 2]]
        return time.process_time() - start

    assert seconds(400_000) < 25 * seconds(50_000), "64 times were quadratic"


def test_what_keeps_no_frame_is_not_followed() -> None:
    assert follow_normalizer("abc", lambda text: text.replace("q", "k")) is None
    assert follow_normalizer("abc", lambda text: text.replace("aq", "x")) is not None
    assert follow_normalizer("bca", lambda text: text.replace("aq", "x")) is None


@pytest.mark.parametrize(
    ("text", "pieces", "ranges", "expected"),
    [
        ("\u0634\u0651\u064e", ["\u0634", "\u064e", "\u0651"], [(0, 2), (2, 4), (4, 6)], [1, 2]),
        ("\u0634\u0651\u064e", ["\u0634", "\u064e", "\u0651"], [(0, 2), (2, 6), (2, 6)], []),
        ("e\u0301x", ["é", "x"], [(0, 3), (3, 4)], []),
        ("e\u0301x", ["é", "x"], [(0, 1), (3, 4)], [0]),
        ("e\u0301x", ["é", "x"], [(0, 3), (0, 4)], []),
        ("\u1105\u1173\u11af", ["를"], [(0, 6)], [0]),
        ("ab", ["a", "b"], [(0, 2), (0, 2)], []),
        ("ab", ["a", "b"], [(0, 1), (0, 1)], [0, 1]),
        ("ab", [" a", "b"], [(0, 1), (1, 2)], []),
        ("ab", ["", "b"], [(0, 1), (1, 2)], []),
        ("é", ["é"], [(0, 1)], [0]),
        ("ée\u0301", ["\udcc3", "\udca9é"], [(0, 1), (1, 5)], []),
        ("ée\u0301", ["\udcc3", "\udca9e"], [(0, 1), (1, 5)], [1]),
    ],
)
def test_wrong_ranges_are_condemned(
    text: str, pieces: list[str], ranges: list[tuple[int, int]], expected: list[int]
) -> None:
    contents = [piece.encode(errors="surrogateescape") for piece in pieces]
    nfc = partial(unicodedata.normalize, "NFC")
    assert find_unproven(np.array(ranges), contents, text.encode(), nfc) == expected


@pytest.mark.parametrize(
    ("text", "pieces", "ranges", "expected"),
    [
        ("bad \ufffd\ufffd bytes \ufffd", [" bad", " bytes"], [(0, 20), (0, 20)], []),
        ("bad \ufffd bytes \ufffd", [" bad", " byte"], [(0, 17), (0, 17)], [0, 1]),
        ("t \ufffd", ["t"], [(0, 5)], []),
        ("\ufffd t", ["t"], [(0, 5)], []),
        ("t \ufffd", ["t "], [(0, 1)], []),  # a space that comes last instead of first
        ("t \ufffdx", ["t", "x"], [(0, 5), (5, 6)], [0]),
        ("x\ufffd t", ["x", "t"], [(0, 1), (1, 6)], [1]),
        ("t x", ["t ", "x"], [(0, 1), (2, 3)], [0]),
        ("t \ufffd", ["   t"], [(0, 1)], [0]),
    ],
)
def test_white_space_may_be_left_out_at_the_ends_of_a_text_only(
    text: str, pieces: list[str], ranges: list[tuple[int, int]], expected: list[int]
) -> None:
    contents = [piece.encode() for piece in pieces]
    assert find_unproven(np.array(ranges), contents, text.encode(), collapse) == expected


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("\nt", [" ", "t"], []),
        ("t\n", ["t", " "], []),
        ("t\nt", ["t", " ", "t"], [1]),  # none of it may be missing here
        ("\nt", ["  ", "t"], [0]),
    ],
)
def test_a_lone_space_may_be_a_part_of_what_a_blank_at_an_end_became(
    text: str, pieces: list[str], expected: list[int]
) -> None:
    """`align` wrote such ranges, and `validate --tokenizers` refused them."""
    contents = [piece.encode() for piece in pieces]
    ranges = np.stack([np.arange(len(text)), np.arange(len(text)) + 1], axis=1)

    def expand(piece: str) -> str:
        return piece.replace("\n", " \n ")

    assert find_unproven(ranges, contents, text.encode(), expand) == expected


@pytest.mark.parametrize(
    ("text", "ranges", "expected"),
    [
        ("a  ⅔ b", [(1, 2)], [(1, 6)]),  # white space only: to the next word
        ("a  ⅔ b", [(4, 5)], [(3, 6)]),
        ("a  ⅔ b", [(0, 4)], [(0, 6)]),
        ("ab  ", [(2, 3)], [(0, 3)]),  # none follows
        ("  ", [(0, 1)], [(0, 1)]),
    ],
)
def test_ranges_are_widened_to_whole_words(
    text: str, ranges: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert list(map(tuple, words_around(np.array(ranges), text).tolist())) == expected
