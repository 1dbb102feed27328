"""Tokenizers to try: real ones, those of the tests, and others made afresh from a seed."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tests.fuzz.texts import make_text
from tests.support import tokenizer_zoo as zoo

REAL = (
    *(name for name in zoo.SHARED_NAMES if (zoo.SHARED / name).is_dir()),
    *(*zoo.PACKAGED, "tekken_240911.json"),
)
SMALL = (*zoo.SMALL, *zoo.NORMALIZING)
CL100K_PATTERN = zoo.QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "spaces", "strip")
ADDED = (
    *("  ", "    ", "ab", "\n\n", "<x>", "<|im_x|>", "<TOOL>", "é", "e\u0301", "Ａ", " the", "▁▁"),
    *("1", "한", "\u0301", "[MASK]", "ﬁ", "don't", "\u3000", "a b", "ſ", "<s>"),
)


def source(name: str) -> Path:
    """Return the file or folder of a tokenizer by its name."""
    path = zoo.MISTRAL_DATA / name
    return path if path.is_file() else zoo.source(name)


def write_fresh(seed: str, folder: Path) -> Path:
    """Make a tokenizer that its seed describes, and write it."""
    choose = random.Random(seed)
    corpus = [*zoo.SENTENCES * 3, *(make_text(choose) for _ in range(200))]
    kind = choose.choice((_byte_level, _byte_level, _byte_fallback, _unigram, _word_pieces))
    tokenizer = kind(choose, corpus)
    names = [choose.choice((*NORMALIZERS, "bert", "precompiled")) for _ in range(3)]
    steps = [_normalizer(choose, n) for n in names[: choose.choice((0, 0, 1, 1, 2, 3))]]
    if steps:
        steps += [tokenizer.normalizer] if tokenizer.normalizer else []
        choose.shuffle(steps)
        tokenizer.normalizer = normalizers.Sequence(steps)
    for content in choose.sample(ADDED, choose.choice((0, 0, 2, 4, 6, 8))):
        names = ["single_word", "lstrip", "rstrip", "special", "normalized"]
        flags = {name: choose.random() < 0.35 for name in names}
        tokenizer.add_tokens([AddedToken(content, **flags)])
    body = json.loads(tokenizer.to_str())
    added = body["added_tokens"]
    body["added_tokens"] = [token for token in added if token["content"][:3] != "<0x"]
    folder.mkdir(parents=True, exist_ok=True)
    return zoo.write_definition(body, folder)


def _byte_level(choose: random.Random, corpus: Sequence[str]) -> Tokenizer:
    pattern = choose.choice([None, CL100K_PATTERN, zoo.QWEN_PATTERN])
    prefix = choose.random() < 0.3
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)]
    if pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if choose.random() < 0.3:
        extra = (pre_tokenizers.Digits(True), pre_tokenizers.Punctuation("contiguous"))
        steps.insert(0, choose.choice(extra))
    tokenizer = Tokenizer(models.BPE())
    alone = len(steps) == 1  # the fast path takes no sequence of one
    tokenizer.pre_tokenizer = steps[0] if alone else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = choose.choice((300, 500, 900))
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _byte_fallback(choose: random.Random, corpus: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if choose.random() < 0.5:
        steps = [normalizers.Prepend("▁")] if choose.random() < 0.7 else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = _metaspace(choose)
    size, names = choose.choice((400, 700)), _control_pieces()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _unigram(choose: random.Random, corpus: Sequence[str]) -> Tokenizer:
    ranked = _frequent(["▁" + "▁".join(text.split(" ")) for text in corpus], 500)
    total = sum(ranked.values())
    vocab = [(piece, 0.0) for piece in _control_pieces() if piece not in ranked]
    vocab += [(piece, math.log(number / total)) for piece, number in ranked.items()]
    fallback = choose.random() < 0.5
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=fallback))
    spaced = [pre_tokenizers.WhitespaceSplit()] if choose.random() < 0.3 else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*spaced, _metaspace(choose)])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(_control_pieces()[:3])
    return tokenizer


def _word_pieces(choose: random.Random, corpus: Sequence[str]) -> Tokenizer:
    ranked = [*_frequent(" ".join(corpus).split(), 400)]
    pieces = dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", *ranked, *(f"##{p}" for p in ranked)])
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    steps = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")
    tokenizer.pre_tokenizer = getattr(pre_tokenizers, choose.choice(steps))()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def _frequent(words: Sequence[str], size: int) -> dict[str, int]:
    """Return pieces that cover much text; the libraries' own trainers differ from run to run."""
    counts = Counter(w[i : i + n] for w in words for i in range(len(w)) for n in range(1, 6))
    ranked = sorted(counts, key=lambda piece: (-counts[piece] * len(piece), piece))
    return {piece: counts[piece] for piece in ranked[:size]}


def _control_pieces() -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def _metaspace(choose: random.Random) -> Any:
    scheme = choose.choice(("always", "first", "never"))
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=choose.random() < 0.7)


def _normalizer(choose: random.Random, name: str) -> Any:
    if name == "spaces":
        return normalizers.Replace(Regex(r"\s+"), " ")
    if name == "strip":
        return normalizers.Strip(choose.random() < 0.5, choose.random() < 0.5)
    if name == "bert":
        return normalizers.BertNormalizer(choose.random() < 0.5, True, None, choose.random() < 0.5)
    if name == "precompiled":
        steps = zoo.definition("xlm_roberta_like")["normalizer"]
        model = {"type": "BPE", "vocab": {}, "merges": []}
        only = {"version": "1.0", "added_tokens": [], "normalizer": steps, "model": model}
        return Tokenizer.from_str(json.dumps(only)).normalizer
    return getattr(normalizers, name)()
