"""Patterns of well-known models, by those that brought them; none is GPT-2's own."""

import unicodedata
from functools import cache
from itertools import groupby
from typing import Any

from pipeline.tokenization.rank_models import LLAMA_3, LLAMA_4, QWEN

Definition = dict[str, Any]

_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
SPLIT_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama3": (LLAMA_3.pattern,),
    "qwen2": (QWEN.pattern,),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}",
    ),
    "o200k": (LLAMA_4.pattern,),
    "nemotron": (
        LLAMA_4.pattern.replace(f"{_CONTRACTIONS}?", "").replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "deepseek": _DEEPSEEK,
}


@cache
def edge_characters() -> tuple[str, ...]:
    """Return the first and last character of every run of one category, and one in 16 of the rest.

    Libraries' tables of Unicode differ in such runs.
    """
    assigned = [chr(code) for code in range(0x80, 0x110000) if not 0xD800 <= code < 0xE000]
    runs = [list(run) for _, run in groupby(assigned, unicodedata.category)]
    runs = [run for run in runs if unicodedata.category(run[0]) not in ("Cn", "Co")]
    return tuple(c for run in runs for c in dict.fromkeys([run[0], *run[::16], run[-1]]))


def byte_level(
    patterns: tuple[str, ...], normalizer: str | None = None, model: Definition | None = None
) -> Definition:
    """Return a byte-level BPE that splits by patterns; of single bytes unless a model is given."""
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    spelling["use_regex"] = not patterns
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer and {"type": normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, spelling]}
        if patterns
        else spelling,
        "model": model or {"type": "BPE", "vocab": {}, "merges": []},
    }
