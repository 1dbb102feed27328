"""The proof that tokens spell a text, against joining their bytes."""

from collections.abc import Sequence
from itertools import pairwise, product
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tokenization.reference import VocabularyTable

VOCABULARY = [b"a", b" ", b" b", b"\xc3\xa9", b"12345678", b"123456789", b"x" * 17, b"", b"ab"]
PIECES = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=8)


def lay_out(
    documents: list[tuple[list[int], bytes]], restarting: Sequence[int] = ()
) -> tuple[list[list[list[int]]], list[bool]]:
    """Each document's byte offsets, and whether they are proven."""
    counts = [len(ids) for ids, _ in documents]
    cu_tokens = np.cumsum([0, *counts], dtype=np.int64)
    input_ids = np.array([token for ids, _ in documents for token in ids], np.uint32)
    byte_offsets, proven = VocabularyTable(VOCABULARY, restarting).lay_out(
        input_ids,
        cu_tokens,
        [text for _, text in documents],
        compare=np.ones(len(documents), np.bool_),
    )
    return [part.tolist() for part in np.split(byte_offsets, cu_tokens[1:-1])], proven.tolist()


@st.composite
def spelled(draw: st.DrawFn) -> tuple[list[int], bytes]:
    """Ids with the text that they spell: without its first space, with a byte changed, or so."""
    ids = draw(PIECES)
    text = b"".join(VOCABULARY[token] for token in ids)
    change = draw(st.sampled_from(["nothing", "first space", "a byte", "length"]))
    if change == "first space":
        return ids, text.removeprefix(b" ")
    if change == "length":
        return ids, text + b"a"
    if change == "a byte" and text:
        place = draw(st.integers(0, len(text) - 1))
        other = bytes([text[place] ^ draw(st.integers(1, 255))])
        return ids, text[:place] + other + text[place + 1 :]
    return ids, text


@given(st.lists(spelled(), min_size=1, max_size=4))
@settings(max_examples=300)
def test_tokens_are_proven_where_they_spell_the_text(
    documents: list[tuple[list[int], bytes]],
) -> None:
    offsets, proven = lay_out(documents)
    for (ids, text), own, fits in zip(documents, offsets, proven, strict=True):
        pieces = [VOCABULARY[token] for token in ids]
        joined = b"".join(pieces)
        assert fits == (all(pieces) and text in (joined, joined.removeprefix(b" ")))
        if fits:
            covered = [text[start:end] for start, end in own]
            assert covered[1:] == pieces[1:]
            assert b"".join(covered) == text


def texts_of(ids: list[int], restarting: Sequence[int]) -> dict[bytes, list[list[int]]]:
    """Every text that tokens may stand for, with offsets: each part's first space may be put."""
    starts = [n for n in range(len(ids)) if n == 0 or ids[n - 1] in restarting]
    spaced = [n for n in starts if VOCABULARY[ids[n]].startswith(b" ")]
    found = {}
    for chosen in product((False, True), repeat=len(spaced)):
        put = {place for place, is_put in zip(spaced, chosen, strict=True) if is_put}
        sizes = [len(VOCABULARY[token]) - (n in put) for n, token in enumerate(ids)]
        bounds = np.cumsum([0, *sizes]).tolist()
        text = b"".join(VOCABULARY[token][n in put :] for n, token in enumerate(ids))
        found[text] = [[a, b] for a, b in pairwise(bounds)]
    return found


@given(PIECES, st.randoms())
@settings(max_examples=300)
def test_a_space_may_be_put_after_each_restarting_token(ids: list[int], random: Random) -> None:
    restarting = [VOCABULARY.index(b"a"), VOCABULARY.index(b"12345678")]
    texts = texts_of(ids, restarting)
    text = random.choice(list(texts))
    (own,), (fits,) = lay_out([(ids, text)], restarting)
    assert fits == all(VOCABULARY[token] for token in ids)
    assert not fits or own == texts[text]
    for wrong in (text + b"a", text[:-1] + b"?", b"?" + text, text.replace(b" ", b"", 1)):
        (own,), (fits,) = lay_out([(ids, wrong)], restarting)
        assert not fits or own == texts[wrong]


def test_after_a_token_that_begins_with_a_space_none_is_put() -> None:
    ids = [VOCABULARY.index(piece) for piece in (b"a", b" ", b" b")]
    for restarting, fits in (([0], True), ([0, VOCABULARY.index(b" b")], False)):
        assert lay_out([(ids, b"a b")], restarting)[1] == [fits]
