from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.tokenization.offset_proof import byte_positions, mend_offsets
from tests.support.text_strategies import texts


@given(texts())
def test_byte_positions_are_those_of_encoded_prefixes(text: str) -> None:
    expected = [len(text[:n].encode()) for n in range(len(text) + 1)]
    assert byte_positions(text).tolist() == expected


def mend(text: str, reported: list[tuple[int, int]], contents: list[bytes]) -> list[list[int]]:
    mended: NDArray[np.int64] = mend_offsets(
        np.array(reported, np.int64).reshape(-1, 2), text.encode(), contents
    )
    result: list[list[int]] = mended.tolist()
    return result


@pytest.mark.parametrize(
    "contents", [[b"a", b"bc"], [b"a", b"c"], [b"b", b"a"], [b"", b"b"], [b"x", b"ab"]]
)
def test_what_does_not_spell_its_cluster_keeps_its_range(contents: list[bytes]) -> None:
    """Lengths that add up are no proof: pieces of what NFKC made of `½` claimed bytes of it."""
    assert mend("ab", [(0, 2), (0, 2)], contents) == [[0, 2], [0, 2]]


def test_an_empty_range_takes_its_cluster() -> None:
    assert mend("½x", [(0, 0), (0, 2), (2, 3)], [b"", b"", b"x"]) == [[0, 2], [0, 2], [2, 3]]


@given(st.data())
def test_mended_offsets_stay_monotone_and_cover_what_was_reported(data: st.DataObject) -> None:
    text = data.draw(texts())
    size = len(text.encode())
    bounds = st.integers(0, size)
    count = data.draw(st.integers(0, 8))
    starts = sorted(data.draw(st.lists(bounds, min_size=count, max_size=count)))
    ends = sorted(data.draw(st.lists(bounds, min_size=count, max_size=count)))
    reported = [(min(a, b), max(a, b)) for a, b in zip(starts, ends, strict=True)]
    pieces = st.sampled_from([b"", b" ", b"a", b" a", text.encode()[:2]])
    mended = mend(text, reported, data.draw(st.lists(pieces, min_size=count, max_size=count)))
    assert mended == sorted(mended)
    assert all(0 <= a <= b <= size for a, b in mended)
    assert all(a[1] <= b[1] for a, b in pairwise(mended))
    covered = {byte for a, b in mended for byte in range(a, b)}
    assert covered >= {byte for a, b in reported for byte in range(a, b)}
