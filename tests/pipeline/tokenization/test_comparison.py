"""Both encoders on every character: splits are compared, not only ids that may hide them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.tokenization import Tokenizer, load_tokenizer
from pipeline.tokenization.backends import LibraryError
from pipeline.tokenization.comparison import (
    differing_splits,
    same_ids,
    show_splits,
    splits_ascii_alike,
)
from pipeline.tokenization.contents import BYTE_LEVEL_ALPHABET
from tests.support.split_patterns import (
    SPLIT_OTHERWISE,
    SPLIT_PATTERNS,
    byte_level,
    edge_characters,
)
from tests.support.tokenizer_zoo import load, shared, write_definition

IDEOGRAPH = "\U000323b0"  # of Unicode 17
HOSTILE = [f"<b>{IDEOGRAPH}<u>old</u></b>", "\u0c5c’ll be", f"{IDEOGRAPH}(a) b"]
ENDING_IN_MERGES = ["{0}<u", "{0}(a", "{0}'s", "{0}’ll", "  {0}", "{0}34"]
"""What the sweep doesn't try."""

REAL = [
    "llama3",
    "llama4",
    "qwen",
    "tekken_240911",
    "deepseek",
    *map(shared, ("qwen2_5", "llama2")),
]

NORMALIZERS = {"qwen35": "NFC"}
"""Of patterns whose sweeps ship with one."""


def that_merges_what_follows(name: str) -> dict[str, Any]:
    """Return a tokenizer with tokens that a split behind a symbol or digit divides or not."""
    model = bpe([("<", "u"), ("(", "a"), ("'", "s"), ("l", "l"), ("3", "4")])
    return byte_level(SPLIT_PATTERNS[name], NORMALIZERS.get(name), model)


def bpe(merges: list[tuple[str, str]]) -> dict[str, Any]:
    pieces = [*BYTE_LEVEL_ALPHABET, *map("".join, merges)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges}


def merging_tokenizer(name: str, folder: Path) -> Tokenizer:
    path = write_definition(that_merges_what_follows(name), folder)
    copy = show_splits(that_merges_what_follows(name))
    assert copy is not None
    return load_tokenizer(str(path), differing=differing_splits(copy))


@pytest.mark.parametrize("name", SPLIT_PATTERNS)
def test_no_document_gets_other_ids_by_the_fast_path(name: str, tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(name, tmp_path)
    reference = load_tokenizer(tokenizer.source, fast=False)
    differing = tokenizer.differing
    assert tokenizer.fast
    every = [chr(c) for start, end in differing.ranges for c in range(start, end)]
    assert IDEOGRAPH in every
    strings = [
        context.replace("{0}", character)
        for context in ENDING_IN_MERGES
        for character in every[::9]
    ]
    texts = [text.encode() for text in [*HOSTILE, *strings]]
    fast, slow = tokenizer.tokenize_batch(texts), reference.tokenize_batch(texts)
    assert fast.input_ids.tolist() == slow.input_ids.tolist()
    assert tokenizer._fast is not None
    ids, cu_tokens = tokenizer._fast.encode_batch(texts)
    assert ids.tolist() != slow.input_ids.tolist()  # they would have been wrong
    assert len(cu_tokens) == len(texts) + 1


def of_merged_spaces(*steps: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer with tokens of two to four spaces, none of which a probe shows divided."""
    one, two = "\u0120", "\u0120" * 2
    model = bpe([(one, one), (two, one), (two, two)])
    definition = byte_level(SPLIT_PATTERNS["llama3"], model=model)
    definition["pre_tokenizer"]["pretokenizers"][:0] = steps
    return definition


DIGITS = {"type": "Digits", "individual_digits": True}
PUNCTUATION = {"type": "Punctuation", "behavior": "Isolated"}


@pytest.mark.parametrize(
    ("steps", "text"), [((DIGITS,), "x    1 y"), ((PUNCTUATION,), "x    ( y"), ((), "x    1 y")]
)
def test_steps_that_the_fast_path_ignores(
    steps: tuple[dict[str, Any], ...], text: str, tmp_path: Path
) -> None:
    definition = of_merged_spaces(*steps)
    path = str(write_definition(definition, tmp_path))
    tokenizer, reference = load_tokenizer(path), load_tokenizer(path, fast=False)
    found, expected = (each.tokenize_batch([text.encode()]) for each in (tokenizer, reference))
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert tokenizer.fast == (not steps)


def ignoring(change: dict[str, Any]) -> dict[str, Any]:
    definition = byte_level(SPLIT_PATTERNS["qwen2"])
    split, spelling = definition["pre_tokenizer"]["pretokenizers"]
    target = split if split.keys() & change.keys() else spelling
    target.update(change)
    return definition


@pytest.mark.parametrize(
    "definition",
    [
        byte_level((SPLIT_OTHERWISE,)),
        ignoring({"behavior": "Contiguous"}),
        ignoring({"behavior": "Removed", "invert": False}),
        ignoring({"add_prefix_space": True}),
        ignoring({"use_regex": True}),
    ],
)
def test_ascii_texts_that_are_split_otherwise(definition: dict[str, Any]) -> None:
    assert not splits_ascii_alike(definition)


@pytest.mark.parametrize("name", SPLIT_PATTERNS)
def test_known_patterns_split_ascii_texts_alike(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pipeline.tokenization.sweep.known_sweeps", dict)
    assert splits_ascii_alike(byte_level(SPLIT_PATTERNS[name]))
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"{name} pattern" for name in SPLIT_PATTERNS), *REAL])
def test_every_character_that_is_not_listed_gives_the_reference_s_ids(
    name: str, tmp_path: Path
) -> None:
    pattern = name.removesuffix(" pattern")
    tokenizer = load(name) if pattern == name else merging_tokenizer(pattern, tmp_path)
    differing = tokenizer.differing.in_texts([c.encode() for c in edge_characters()])
    characters = [c for c, differs in zip(edge_characters(), differing, strict=True) if not differs]
    context = "".join(ENDING_IN_MERGES)
    texts = [
        "".join(context.replace("{0}", character) for character in characters[i : i + 64])
        for i in range(0, len(characters), 64)
    ]
    assert len(texts) > 200
    assert tokenizer._fast is not None
    same = same_ids(tokenizer._reference, tokenizer._fast, texts)
    # Vowels of Unicode 16 that one library's NFC composes: what doesn't spell its text is left.
    wrong = [text for text, equal in zip(texts, same, strict=True) if not equal]
    assert len(wrong) <= 3
    found = tokenizer.tokenize_batch([text.encode() for text in wrong])
    expected = [encoded.ids for encoded in tokenizer._reference.encode_batch(wrong)]
    assert found.input_ids.tolist() == [i for ids in expected for i in ids]


class Failing:
    def encode_batch(self, texts: list[bytes]) -> Any:
        if b"x" in texts:
            raise LibraryError("it fails")
        return np.arange(len(texts)), np.arange(len(texts) + 1)


class Counting:
    def encode_batch(self, texts: list[str]) -> Any:
        return [type("Encoded", (), {"ids": [place]}) for place in range(len(texts))]


def test_a_text_on_which_a_library_fails_differs() -> None:
    reference, encoder = Counting(), Failing()
    texts = ["a", "x", "b"]
    assert same_ids(reference, encoder, texts).tolist() == [True, False, True]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SPLIT_PATTERNS)
def test_known_patterns_need_no_sweep(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pipeline.tokenization.comparison._same_ids_of", pytest.fail)
    definition = byte_level(SPLIT_PATTERNS[name], NORMALIZERS.get(name))
    copy = show_splits(definition)
    assert copy is not None
    assert len(differing_splits(copy)) > 4000
    assert splits_ascii_alike(definition)


@pytest.mark.long
@pytest.mark.slow
def test_a_shipped_sweep_is_what_a_fresh_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = show_splits(byte_level(SPLIT_PATTERNS["llama3"]))
    assert copy is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = differing_splits(copy)
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.setattr("pipeline.tokenization.sweep.known_sweeps", dict)
    assert differing_splits(copy) == shipped
    assert list(tmp_path.rglob("*.json"))
