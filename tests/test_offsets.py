from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.offsets import byte_positions, kept_byte_offsets, mend_offsets, to_character_units
from tests.text_strategies import texts


@given(texts())
def test_byte_positions_are_those_of_encoded_prefixes(text: str) -> None:
    expected = [len(text[:n].encode()) for n in range(len(text) + 1)]
    assert byte_positions(text).tolist() == expected


@given(texts(), st.data())
def test_character_units_are_the_characters_touched(text: str, data: st.DataObject) -> None:
    size = len(text.encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    pairs = np.array(list(zip([0, *cuts], [*cuts, size], strict=True)), np.int64)
    owner = [place for place, character in enumerate(text) for _ in character.encode()]
    for (start, end), (first, last) in zip(pairs, to_character_units(pairs, text), strict=True):
        if start == end:
            assert first == last
        else:
            assert (first, last) == (owner[start], owner[end - 1] + 1)


def mend(
    text: str,
    reported: list[tuple[int, int]],
    lengths: list[int],
    *,
    spaces: tuple[int, ...] = (),
    fill_gaps: bool = True,
) -> list[list[int]]:
    starts_with_space = np.isin(np.arange(len(lengths)), spaces)
    mended: NDArray[np.int64] = mend_offsets(
        np.array(reported, np.int64).reshape(-1, 2),
        text.encode(),
        np.array(lengths, np.int32),
        starts_with_space=starts_with_space,
        fill_gaps=fill_gaps,
    )
    result: list[list[int]] = mended.tolist()
    return result


def test_good_offsets_stay() -> None:
    assert mend("ab cd", [(0, 2), (3, 5)], [2, 2]) == [[0, 2], [3, 5]]
    assert mend("", [], []) == []


def test_pieces_of_a_character_lie_side_by_side() -> None:
    assert mend("x🤗y", [(0, 1), (1, 5), (1, 5), (5, 6)], [1, 1, 3, 1]) == [
        *([0, 1], [1, 2], [2, 5]),
        [5, 6],
    ]


def test_a_prefix_covers_no_byte() -> None:
    assert mend("\nH", [(0, 1), (0, 1), (1, 2)], [1, 1, 1], spaces=(0,)) == [[0, 0], [0, 1], [1, 2]]
    two_words = [(0, 1), (0, 1), (2, 3), (2, 3)]
    expected = [[0, 0], [0, 1], [2, 2], [2, 3]]
    assert mend("a b", two_words, [1, 1, 1, 1], spaces=(0, 2)) == expected


def test_one_byte_too_many_is_no_prefix_without_a_space() -> None:
    assert mend("ab", [(0, 2), (0, 2)], [1, 2]) == [[0, 2], [0, 2]]


def test_unknown_lengths_keep_their_ranges() -> None:
    assert mend("½x", [(0, 2), (0, 2), (2, 3)], [0, 3, 1]) == [[0, 2], [0, 2], [2, 3]]
    assert mend("½x", [(0, 0), (0, 2), (2, 3)], [1, 3, 1]) == [[0, 2], [0, 2], [2, 3]]


@pytest.mark.parametrize(
    ("gap", "filled"),
    [
        ("\u0301", True),
        ("\u0323\u0301", True),
        ("\u1161", True),
        (" ", False),
        ("\u3000", False),
        ("\u200b", False),
        ("\x01", False),
        (",", False),
        ("\u0301 ", False),
    ],
)
def test_only_what_was_composed_goes_to_the_token_before(gap: str, filled: bool) -> None:
    text = f"e{gap}x"
    size = len(text.encode())
    reported = [(0, 1), (size - 1, size)]
    end = size - 1 if filled else 1
    assert mend(text, reported, [1, 1]) == [[0, end], [size - 1, size]]
    assert mend(text, reported, [1, 1], fill_gaps=False) == [list(pair) for pair in reported]


def test_gaps_at_both_ends_are_filled() -> None:
    assert mend("\u0301e\u0301", [(2, 3)], [1]) == [[0, 5]]
    assert mend("e\u0301", [(0, 1), (0, 1)], [1, 1]) == [[0, 3], [0, 3]]


@given(st.data())
def test_mended_offsets_stay_monotone_and_cover_what_was_reported(data: st.DataObject) -> None:
    text = data.draw(texts())
    size = len(text.encode())
    bounds = st.integers(0, size)
    count = data.draw(st.integers(0, 8))
    starts = sorted(data.draw(st.lists(bounds, min_size=count, max_size=count)))
    ends = sorted(data.draw(st.lists(bounds, min_size=count, max_size=count)))
    reported = [(min(a, b), max(a, b)) for a, b in zip(starts, ends, strict=True)]
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    mended = mend(text, reported, lengths, spaces=(0,))
    assert mended == sorted(mended)
    assert all(0 <= a <= b <= size for a, b in mended)
    assert all(a[1] <= b[1] for a, b in pairwise(mended))
    covered = {byte for a, b in mended for byte in range(a, b)}
    assert covered >= {byte for a, b in reported for byte in range(a, b)}


@given(
    st.lists(st.binary(min_size=1, max_size=3), max_size=6),
    st.binary(max_size=3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_kept_bytes_are_found_where_they_are(
    pieces: list[bytes], lost: bytes, prefixed: bool, random: Random
) -> None:
    kept = [bytes(b for b in piece if b not in lost) for piece in pieces]
    kept = [piece for piece in kept if piece]
    text, expected = b"", []
    for piece in kept:
        text += bytes(random.choices(lost, k=random.randint(0, 2))) if lost else b""
        start = len(text)
        for place, byte in enumerate(piece):
            if place and lost and random.random() < 0.3:
                text += lost[:1]
            text += bytes([byte])
        expected.append([start, len(text)])
    lengths = [len(piece) for piece in kept]
    spaces = np.zeros(len(kept), bool)
    if prefixed and kept:
        lengths[0] += 1
        spaces[0] = True
    found = kept_byte_offsets(text, lost, np.array(lengths, np.int32), spaces)
    assert found is not None
    assert found.tolist() == expected


def test_kept_bytes_that_do_not_add_up() -> None:
    no_space = np.zeros(1, bool)
    assert kept_byte_offsets(b"ab_", b"_", np.array([1], np.int32), no_space) is None
    assert kept_byte_offsets(b"ab_", b"_", np.array([3], np.int32), no_space) is None
    assert kept_byte_offsets(b"ab_", b"_", np.array([0], np.int32), no_space) is None
