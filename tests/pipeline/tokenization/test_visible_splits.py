import unicodedata
from functools import cache
from itertools import product

import orjson
import pytest
import tokenizers

from pipeline.tokenization.pretokenizer_splits import CONTEXT, show_splits
from tests.support.split_patterns import SPLIT_PATTERNS, byte_level
from tests.support.tokenizer_zoo import definition

BEFORE = ["", "a", "A", "1", "11", "!", "!!", " ", "  ", "'", "a'", "'l", "一", "é", "９", "\u0301"]
AFTER = ["", "a", "Aa", "A", "1", "!", " ", "  ", "'s", "’ll", "一", "９", "\u0301", "/"]
SPECIAL = (
    "ſ\u212a\u0085\u00a0\u2028\u3000\u200b一龥龦\u3040ぁゟ゠ヿ・３İıßẞﬆ\u0345’\u180e\ufeffⅠ①㇀"
)


@cache
def characters() -> list[str]:
    """Return some of each category, and some that patterns name."""
    by_category: dict[str, list[str]] = {}
    for code_point in range(0x80, 0x20000, 3):
        found = by_category.setdefault(unicodedata.category(chr(code_point)), [])
        if len(found) < 4:
            found.append(chr(code_point))
    by_category.pop("Cs")
    return sorted({*SPECIAL, *(character for some in by_category.values() for character in some)})


@pytest.mark.parametrize("name", SPLIT_PATTERNS)
def test_ids_of_the_context_tell_apart_what_any_context_does(name: str) -> None:
    copy = show_splits(byte_level(SPLIT_PATTERNS[name]))
    assert copy is not None
    tokenizer = tokenizers.Tokenizer.from_str(orjson.dumps(copy).decode())

    def joined(character: str) -> frozenset[int]:
        """Return the places of the context that a token of the copy spans."""
        offsets = tokenizer.encode(CONTEXT.replace("{0}", character)).offsets
        return frozenset(place for start, end in offsets for place in range(start + 1, end))

    def splits(character: str) -> tuple[tuple[int, int], ...]:
        texts = [f"\n{before}{character}{after}\n" for before, after in product(BEFORE, AFTER)]
        split = tokenizer.pre_tokenizer.pre_tokenize_str
        return tuple(place for text in texts for _, place in split(text))

    classes: dict[object, set[object]] = {}
    for character in characters():
        classes.setdefault(joined(character), set()).add(splits(character))
    assert len(classes) >= 4
    assert max(map(len, classes.values())) == 1


@pytest.mark.parametrize("name", ["llama_like", "unigram", "word_pieces"])
def test_what_has_no_splits_to_show_has_no_copy(name: str) -> None:
    assert show_splits(definition(name)) is None


def test_copies_of_one_kind_are_equal() -> None:
    qwen = definition("qwen_like")
    other = qwen | {"model": definition("gpt2_like")["model"], "added_tokens": []}
    other["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] ^= True
    assert show_splits(qwen) == show_splits(other)
