from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.tokenization import sweep as tokenization_sweep
from pipeline.tokenization.sweep import (
    ELSEWHERE,
    IDS_CONTEXT,
    STRIDE,
    SWEPT,
    DifferingCharacters,
    find_differing,
    known_sweeps,
    remembered_differing,
)
from tests.support.text_strategies import texts


def encoders_that_differ_on(characters: set[str]) -> tokenization_sweep.SameTokens:
    def same_tokens(strings: Sequence[str]) -> NDArray[np.bool_]:
        return np.array([not characters & set(string) for string in strings])

    return same_tokens


@given(st.sets(st.sampled_from([chr(c) for start, end in SWEPT for c in (start, end - 1)])))
@settings(max_examples=5)
def test_exactly_the_characters_that_differ_are_found(characters: set[str]) -> None:
    found = find_differing(encoders_that_differ_on(characters), IDS_CONTEXT)
    listed = {chr(c) for start, end in found.ranges for c in range(start, end)}
    assert listed == characters
    assert len(found) == len(characters)


def test_a_difference_that_no_character_has_alone_takes_them_all() -> None:
    pair = {chr(SWEPT[0][0]), chr(SWEPT[0][0] + 1)}
    differ = lambda strings: np.array([not pair <= set(s) for s in strings])  # noqa: E731
    found = find_differing(differ, IDS_CONTEXT)
    assert found.ranges == ((SWEPT[0][0], SWEPT[0][0] + 2),)


def test_one_code_point_is_tried_for_its_neighbours_where_none_is_assigned() -> None:
    start = ELSEWHERE[1][0] + 5 * STRIDE
    found = find_differing(encoders_that_differ_on({chr(start)}), IDS_CONTEXT)
    assert found.ranges == ((start, start + STRIDE),)


def test_together_both_hold() -> None:
    one, other = DifferingCharacters(((1, 3), (9, 10))), DifferingCharacters(((2, 5), (5, 6)))
    assert (one | other).ranges == ((1, 6), (9, 10))


@given(st.lists(texts(), max_size=4), st.sets(st.characters(min_codepoint=0x80), max_size=5))
def test_texts_with_a_differing_character_are_found(
    strings: list[str], characters: set[str]
) -> None:
    characters |= {"é", "\U0010ffff"}
    strings += [f"plain {character}" for character in sorted(characters)]
    ranges = tuple((ord(character), ord(character) + 1) for character in sorted(characters))
    found = DifferingCharacters(ranges).in_texts([string.encode() for string in strings])
    assert found.tolist() == [bool(characters & set(string)) for string in strings]


def test_what_was_found_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = DifferingCharacters(((0x20C1, 0x20C2),))
    assert remembered_differing("one", lambda: found) == found
    assert remembered_differing("one", lambda: DifferingCharacters(())) == found
    assert remembered_differing("two", lambda: DifferingCharacters(())) != found
    known = next(iter(known_sweeps().values()))
    monkeypatch.setattr(tokenization_sweep, "name_of_sweep", lambda _: next(iter(known_sweeps())))
    assert remembered_differing("one", lambda: found) == known
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for file in tmp_path.rglob("*.json"):
        file.write_text("[[1, ")
    assert remembered_differing("one", lambda: found) == found


def test_a_folder_that_can_not_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vocag").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = DifferingCharacters(((0x20C1, 0x20C2),))
    assert remembered_differing("one", lambda: found) == found
