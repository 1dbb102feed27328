"""Both encoders on every character: splits are compared, not only ids that may hide them."""

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.tokenization import load_tokenizer, pretokenizer_splits
from pipeline.tokenization.backends import FastEncoder, HuggingFaceReference
from pipeline.tokenization.contents import BYTE_LEVEL_ALPHABET
from pipeline.tokenization.pretokenizer_splits import (
    find_difference,
    name_of,
    show_splits,
    why_unlike,
)
from pipeline.tokenization.rank_models import LLAMA_3
from tests.support.split_patterns import SPLIT_PATTERNS, byte_level, edge_characters
from tests.support.token_batches import require_equal
from tests.support.tokenizer_zoo import load, shared, write_definition

IDEOGRAPH = "\U000323b0"  # of Unicode 17
HOSTILE = [f"<b>{IDEOGRAPH}<u>old</u></b>", "\u0c5c’ll be", "a'ſs 'ſ's", "a \u180e b"]
ENDING_IN_MERGES = ["{0}<u", "{0}(a", "{0}'s", "{0}’ll", "  {0}", "{0}34"]
"""What the comparison doesn't try."""

REAL = [
    *("llama3", "llama4", "qwen", "tekken_240911", "deepseek", "mistral_v1"),
    *map(shared, ("qwen2_5", "llama2", "smollm2", "deepseek_llm", "gpt_neox", "whisper_tiny")),
]
NORMALIZERS = {"qwen35": "NFC"}
"""Of patterns whose models have one."""


def bpe(*merges: tuple[str, str]) -> dict[str, Any]:
    pieces = [*BYTE_LEVEL_ALPHABET, *map("".join, merges)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges}


def that_merges_what_follows(name: str) -> dict[str, Any]:
    """Return a tokenizer with tokens that a split behind a symbol or digit divides or not."""
    model = bpe(("<", "u"), ("(", "a"), ("'", "s"), ("l", "l"), ("3", "4"))
    return byte_level(SPLIT_PATTERNS[name], NORMALIZERS.get(name), model)


@pytest.mark.parametrize("name", SPLIT_PATTERNS)
def test_no_document_gets_other_ids_by_the_fast_path(name: str, tmp_path: Path) -> None:
    path = str(write_definition(that_merges_what_follows(name), tmp_path))
    tokenizer, reference = load_tokenizer(path), load_tokenizer(path, fast=False)
    assert tokenizer.fast
    characters = [IDEOGRAPH, *edge_characters()[::29]]
    strings = [c.replace("{0}", character) for c in ENDING_IN_MERGES for character in characters]
    texts = [text.encode() for text in [*HOSTILE, *strings]]
    require_equal(tokenizer.tokenize_batch(texts), reference.tokenize_batch(texts))
    assert tokenizer.num_reference_documents < len(texts) / 8


def of_merged_spaces(*steps: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer with tokens of two to four spaces, none of which a probe shows divided."""
    one, two = "\u0120", "\u0120" * 2
    model = bpe((one, one), (two, one), (two, two))
    definition = byte_level(SPLIT_PATTERNS["llama3"], model=model)
    definition["pre_tokenizer"]["pretokenizers"][:0] = steps
    return definition


DIGITS = {"type": "Digits", "individual_digits": True}
PUNCTUATION = {"type": "Punctuation", "behavior": "Isolated"}


@pytest.mark.parametrize(
    ("steps", "text"), [((DIGITS,), "x    1 y"), ((PUNCTUATION,), "x    ( y"), ((), "x    1 y")]
)
def test_steps_next_to_a_known_pattern(
    steps: tuple[dict[str, Any], ...], text: str, tmp_path: Path
) -> None:
    path = str(write_definition(of_merged_spaces(*steps), tmp_path))
    tokenizer, reference = load_tokenizer(path), load_tokenizer(path, fast=False)
    require_equal(*(each.tokenize_batch([text.encode()]) for each in (tokenizer, reference)))


def changed(step: int, **change: object) -> dict[str, Any]:
    definition = byte_level(SPLIT_PATTERNS["qwen2"])
    definition["pre_tokenizer"]["pretokenizers"][step].update(change)
    return definition


SPLIT_OTHERWISE = LLAMA_3.pattern.replace(r"\s*[\r\n]+", r"\s*[\r\n]")
"""Next to a pattern that `fastokens` has a scanner for."""


@pytest.mark.slow
def test_what_is_near_a_known_pattern_is_split_alike() -> None:
    assert find_difference(byte_level((SPLIT_OTHERWISE,))) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "definition",
    [
        changed(0, behavior="Contiguous"),
        changed(0, behavior="MergedWithNext"),
        changed(1, add_prefix_space=True),
        changed(1, use_regex=True),
    ],
)
def test_steps_near_known_ones_split_alike(
    definition: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their patterns are known, which compared all characters: the classes' edges are enough."""
    edges = tuple((ord(character), ord(character) + 1) for character in edge_characters())
    monkeypatch.setattr(pretokenizer_splits, "TRIED", edges)
    assert find_difference(definition) is None


def encoder_of(change: Callable[[dict[str, Any]], None]) -> type[FastEncoder]:
    """Return an encoder that splits by other steps than the reference."""

    class Other(FastEncoder):
        def __init__(self, file: Any, reference: HuggingFaceReference) -> None:
            mine = json.loads(json.dumps(reference.definition))
            change(mine["pre_tokenizer"]["pretokenizers"])
            other = HuggingFaceReference.__new__(HuggingFaceReference)
            vars(other).update(vars(reference) | {"definition": mine})
            super().__init__(file, other)

    return Other


def alone(steps: list[dict[str, Any]]) -> None:
    """Take one letter, which two libraries may class otherwise, out of the letters."""
    pattern = steps[0]["pattern"]
    pattern["Regex"] = pattern["Regex"].replace(r"\p{L}+", "(?:(?!\u1c89)\\p{L})+")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda steps: steps.insert(0, DIGITS), "the text .*1.* is split elsewhere"),
        (lambda steps: steps[1].update(add_prefix_space=True), "the text .* is split elsewhere"),
        (alone, r"texts are split around U\+1C8"),
    ],
)
def test_a_difference_is_found_and_takes_the_fast_path_away(
    change: Callable[[dict[str, Any]], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pretokenizer_splits, "known_splits", frozenset)
    monkeypatch.setattr(pretokenizer_splits, "TRIED", ((0x1C80, 0x1D00),))
    monkeypatch.setattr(pretokenizer_splits, "FastEncoder", encoder_of(change))
    path = write_definition(that_merges_what_follows("llama3"), tmp_path)
    tokenizer = load_tokenizer(str(path))
    assert not tokenizer.fast
    assert re.search(f"^fastokens: .*{reason}", tokenizer.slow_reason or "")
    monkeypatch.setattr(pretokenizer_splits, "find_difference", pytest.fail)
    assert load_tokenizer(str(path)).slow_reason == tokenizer.slow_reason  # remembered
    for file in tmp_path.rglob("fast-path/*.json"):
        file.write_text('{"differs": ')
    monkeypatch.setattr(pretokenizer_splits, "find_difference", lambda _: None)
    assert load_tokenizer(str(path)).fast  # what can't be read is found again


def test_a_folder_that_can_not_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vocag").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pretokenizer_splits, "known_splits", frozenset)
    monkeypatch.setattr(pretokenizer_splits, "find_difference", lambda _: "other")
    assert why_unlike(that_merges_what_follows("llama3")) == "other"


@pytest.mark.parametrize("name", SPLIT_PATTERNS)
def test_known_patterns_need_no_comparison(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretokenizer_splits, "find_difference", pytest.fail)
    assert why_unlike(byte_level(SPLIT_PATTERNS[name], NORMALIZERS.get(name))) is None


def test_with_other_libraries_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    own = f"tokenizers=={version('tokenizers')}\n"
    if own not in (repository / "constraints.txt").read_text():
        pytest.skip(f"comparisons are shipped for constraints.txt's versions, not {own}")
    copy = show_splits(byte_level(SPLIT_PATTERNS["llama3"]))
    assert copy is not None
    name = name_of(copy)
    assert name in pretokenizer_splits.known_splits()
    monkeypatch.setattr(pretokenizer_splits, "version", lambda _: "0.0.1")
    assert name_of(copy) not in pretokenizer_splits.known_splits()


@pytest.mark.long
@pytest.mark.slow
def test_a_shipped_comparison_is_what_a_fresh_one_finds() -> None:
    assert find_difference(byte_level(SPLIT_PATTERNS["llama3"])) is None


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"normalizer": {"type": "NFC"}}, "its steps need tables of characters"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": r"\s"}, "content": ""}}, "tables"),
    ],
)
def test_a_model_of_characters_has_no_splits_to_show(
    step: dict[str, Any], reason: str | None
) -> None:
    definition = {"model": {"type": "BPE", "vocab": {}, "merges": []}, **step}
    found = why_unlike(definition)
    assert (found is None) if reason is None else (found is not None and reason in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_every_kind_of_character_gives_the_reference_s_ids(name: str) -> None:
    tokenizer = load(name)
    assert tokenizer._fast is not None
    context = "".join(ENDING_IN_MERGES)
    texts = [
        "".join(context.replace("{0}", character) for character in edge_characters()[i : i + 64])
        for i in range(0, len(edge_characters()), 64)
    ]
    assert len(texts) > 200
    input_ids, cu_tokens, unsure = tokenizer._fast.encode_batch(texts)
    expected = tokenizer._reference.encode_batch(texts)
    for own, encoded, left in zip(
        np.split(input_ids, cu_tokens[1:-1]), expected, unsure, strict=True
    ):
        assert left or own.tolist() == encoded.ids.tolist()
    assert unsure.mean() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_every_piece_gives_the_reference_s_ids(name: str) -> None:
    """A library may look a word up whole that merges wouldn't make."""
    tokenizer = load(name)
    assert tokenizer._fast is not None
    pieces = [piece.replace("▁", " ") for piece in tokenizer._reference.pieces]
    spelled = (content.decode(errors="ignore") for content in tokenizer._vocabulary.entries)
    every = sorted({*pieces, *spelled} - {""})[:: 1 + len(pieces) // 40_000]
    for context in ("{}", "x{}y\n", "1{}{}"):
        texts = [context.replace("{}", piece) for piece in every]
        input_ids, cu_tokens, unsure = tokenizer._fast.encode_batch(texts)
        own = np.split(input_ids, cu_tokens[1:-1])
        for text, ids, encoded, left in zip(
            texts, own, tokenizer._reference.encode_batch(texts), unsure, strict=True
        ):
            assert left or ids.tolist() == encoded.ids.tolist(), text
