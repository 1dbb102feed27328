"""Tokenizers to try: real ones, those of the tests, and others made afresh from a seed."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers

from tests.fuzz.texts import make_text
from tests.support import tokenizer_zoo as zoo
from tests.support.split_patterns import SPLIT_PATTERNS, byte_level

REAL = (
    *(name for name in zoo.SHARED_NAMES if (zoo.SHARED / name).is_dir()),
    *(*zoo.PACKAGED, "tekken_240911"),
)
SMALL = (*zoo.SMALL, *zoo.NORMALIZING)
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Replace", "Strip")
WORD_SPLITTERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")
CONTROL_PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
ADDED = (
    *("  ", "    ", "ab", "\n\n", "<x>", "<|im_x|>", "<TOOL>", "é", "e\u0301", "Ａ", " the", "▁▁"),
    *("1", "한", "\u0301", "[MASK]", "ﬁ", "don't", "\u3000", "a b", "ſ", "<s>"),
)


def write_fresh(seed: str, folder: Path) -> Path:
    """Make a tokenizer that its seed describes, and write it."""
    choose = random.Random(seed)
    corpus = [*zoo.SENTENCES * 3, *(make_text(choose) for _ in range(200))]
    kind = choose.choice((_byte_level, _byte_level, _byte_fallback, _unigram, _word_pieces))
    body = kind(choose, corpus)
    names = choose.choices((*NORMALIZERS, "BertNormalizer", "Precompiled"), k=3)
    steps = [_normalizer(choose, name) for name in names[: choose.choice((0, 0, 1, 1, 2, 3))]]
    if steps:
        steps += [body["normalizer"]] if body["normalizer"] else []
        choose.shuffle(steps)
        body["normalizer"] = {"type": "Sequence", "normalizers": steps}
    tokenizer = Tokenizer.from_str(json.dumps(body))
    for content in choose.sample(ADDED, choose.choice((0, 0, 2, 4, 6, 8))):
        names = ["single_word", "lstrip", "rstrip", "special", "normalized"]
        flags = {name: choose.random() < 0.35 for name in names}
        tokenizer.add_tokens([AddedToken(content, **flags)])
    folder.mkdir(parents=True, exist_ok=True)
    return zoo.write_definition(json.loads(tokenizer.to_str()), folder)


def _byte_level(choose: random.Random, corpus: Sequence[str]) -> zoo.Definition:
    body = byte_level(SPLIT_PATTERNS[choose.choice([*SPLIT_PATTERNS])])
    splitter = body["pre_tokenizer"]
    steps = splitter.get("pretokenizers", [splitter])
    steps[-1]["add_prefix_space"] = choose.random() < 0.3
    if choose.random() < 0.3:
        digits = {"type": "Digits", "individual_digits": True}
        steps.insert(0, choose.choice((digits, {"type": "Punctuation", "behavior": "Contiguous"})))
        body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(body, corpus, choose.choice((300, 500, 900)), initial_alphabet=alphabet)


def _byte_fallback(choose: random.Random, corpus: Sequence[str]) -> zoo.Definition:
    body = deepcopy(zoo.definition("llama_like")) | {"added_tokens": []}
    if choose.random() < 0.5:
        body |= {"normalizer": None, "pre_tokenizer": _metaspace(choose)}
    elif choose.random() < 0.3:
        body["normalizer"] = body["normalizer"]["normalizers"][1]  # no dummy prefix
    size = choose.choice((400, 700))
    body = _trained(body, corpus, size, special_tokens=list(CONTROL_PIECES))
    return body | {"added_tokens": body["added_tokens"][:3]}


def _unigram(choose: random.Random, corpus: Sequence[str]) -> zoo.Definition:
    body = deepcopy(zoo.definition("unigram"))
    ranked = _frequent(["▁" + "▁".join(text.split(" ")) for text in corpus], 500)
    total = sum(ranked.values())
    vocab = [(piece, 0.0) for piece in CONTROL_PIECES if piece not in ranked]
    vocab += [(piece, math.log(number / total)) for piece, number in ranked.items()]
    body["model"] |= {"vocab": vocab, "unk_id": 0, "byte_fallback": choose.random() < 0.5}
    spaced = [{"type": "WhitespaceSplit"}] if choose.random() < 0.3 else []
    body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*spaced, _metaspace(choose)]}
    return body


def _word_pieces(choose: random.Random, corpus: Sequence[str]) -> zoo.Definition:
    body = deepcopy(zoo.definition("word_pieces")) | {"normalizer": None}
    ranked = [*_frequent(" ".join(corpus).split(), 400)]
    pieces = dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", *ranked, *(f"##{p}" for p in ranked)])
    body["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces)}
    body["pre_tokenizer"] = {"type": choose.choice(WORD_SPLITTERS)}
    return body


def _trained(
    body: zoo.Definition, corpus: Sequence[str], size: int, **options: Any
) -> zoo.Definition:
    """Return a BPE with the vocabulary that a corpus gives it."""
    tokenizer = Tokenizer.from_str(json.dumps(body))
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
    tokenizer.train_from_iterator(corpus, trainer)
    trained: zoo.Definition = json.loads(tokenizer.to_str())
    return trained


def _frequent(words: Sequence[str], size: int) -> dict[str, int]:
    """Return pieces that cover much text; the libraries' own trainers differ from run to run."""
    counts = Counter(w[i : i + n] for w in words for i in range(len(w)) for n in range(1, 6))
    ranked = sorted(counts, key=lambda piece: (-counts[piece] * len(piece), piece))
    return {piece: counts[piece] for piece in ranked[:size]}


def _metaspace(choose: random.Random) -> zoo.Definition:
    scheme, split = choose.choice(("always", "first", "never")), choose.random() < 0.7
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def _normalizer(choose: random.Random, name: str) -> zoo.Definition:
    if name == "Precompiled":
        precompiled: zoo.Definition = zoo.definition("xlm_roberta_like")["normalizer"]
        return precompiled
    first, second = choose.random() < 0.5, choose.random() < 0.5
    options: dict[str, zoo.Definition] = {
        "Replace": {"pattern": {"Regex": r"\s+"}, "content": " "},
        "Strip": {"strip_left": first, "strip_right": second},
        "BertNormalizer": {"clean_text": first, "handle_chinese_chars": True,
                           "strip_accents": None, "lowercase": second},
    }  # fmt: skip
    return {"type": name, **options.get(name, {})}
