"""Tokenizers to try: real ones, those of the tests, and others trained afresh from a seed."""

import json
import random
from collections.abc import Callable
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
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = (
    *("  ", "    ", "ab", "\n\n", "<x>", "<|im_x|>", "<TOOL>", "é", "e\u0301", "Ａ", " the", "▁▁"),
    *("1", "한", "\u0301", "[MASK]", "ﬁ", "don't", "\u3000", "a b", "ſ", "<s>"),
)


def source(name: str) -> Path:
    """Return the file or folder of a tokenizer by its name."""
    path = zoo.MISTRAL_DATA / name
    return path if name and path.is_file() else zoo.source(name)


def write_fresh(seed: str, folder: Path) -> Path:
    """Train a tokenizer that its seed describes, and write it."""
    choose = random.Random(seed)
    kind = choose.choice(["byte_level", *KINDS])
    tokenizer = Tokenizer(KINDS[kind][0]())
    steps = [choose.choice(NORMALIZERS)(choose) for _ in range(choose.choice((0, 0, 1, 1, 2, 3)))]
    trainer = KINDS[kind][1](choose, tokenizer)
    corpus = [*zoo.SENTENCES * 3, *(make_text(choose) for _ in range(200))]
    tokenizer.train_from_iterator(corpus, trainer)
    if steps:
        steps += [tokenizer.normalizer] if tokenizer.normalizer else []
        choose.shuffle(steps)
        tokenizer.normalizer = normalizers.Sequence(steps)
    _add_tokens(choose, tokenizer)
    body = json.loads(tokenizer.to_str())
    if kind in ("byte_fallback", "unigram"):
        body["model"]["byte_fallback"] = kind == "byte_fallback" or choose.random() < 0.5
        body["added_tokens"] = [t for t in body["added_tokens"] if t["content"][:3] != "<0x"]
    folder.mkdir(parents=True, exist_ok=True)
    return zoo.write_definition(body, folder)


def _add_tokens(choose: random.Random, tokenizer: Tokenizer) -> None:
    for content in choose.sample(ADDED, choose.choice((0, 0, 2, 4, 6, 8))):
        flags = {
            name: choose.random() < 0.35 for name in ("single_word", "lstrip", "rstrip", "special")
        }
        normalized = choose.random() < 0.5
        tokenizer.add_tokens([AddedToken(content, normalized=normalized, **flags)])


def _byte_level(choose: random.Random, tokenizer: Tokenizer) -> Any:
    prefix = choose.random() < 0.3
    pattern = choose.choice([None, GPT2_PATTERN, CL100K_PATTERN, zoo.QWEN_PATTERN])
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)]
    if pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if choose.random() < 0.3:
        extra = (pre_tokenizers.Digits(True), pre_tokenizers.Punctuation("contiguous"))
        steps.insert(0, choose.choice(extra))
    alone = len(steps) == 1  # the fast path takes no sequence of one
    tokenizer.pre_tokenizer = steps[0] if alone else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = choose.choice((300, 500, 900))
    return trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)


def _byte_fallback(choose: random.Random, tokenizer: Tokenizer) -> Any:
    if choose.random() < 0.5:
        steps = [normalizers.Prepend("▁")] if choose.random() < 0.7 else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = _metaspace(choose)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    size = choose.choice((400, 700))
    return trainers.BpeTrainer(vocab_size=size, special_tokens=names, show_progress=False)


def _unigram(choose: random.Random, tokenizer: Tokenizer) -> Any:
    spaced = [pre_tokenizers.WhitespaceSplit()] if choose.random() < 0.3 else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*spaced, _metaspace(choose)])
    tokenizer.decoder = decoders.Metaspace()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return trainers.UnigramTrainer(
        vocab_size=600, special_tokens=names, unk_token="<unk>", show_progress=False
    )


def _word_pieces(choose: random.Random, tokenizer: Tokenizer) -> Any:
    steps = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")
    tokenizer.pre_tokenizer = getattr(pre_tokenizers, choose.choice(steps))()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[UNK]", "[CLS]", "[SEP]"]
    return trainers.WordPieceTrainer(vocab_size=500, special_tokens=names, show_progress=False)


def _metaspace(choose: random.Random) -> Any:
    scheme = choose.choice(("always", "first", "never"))
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=choose.random() < 0.7)


def _bert(choose: random.Random) -> Any:
    flags = {name: choose.random() < 0.5 for name in ("clean_text", "lowercase")}
    return normalizers.BertNormalizer(handle_chinese_chars=True, strip_accents=None, **flags)


def _precompiled(_: random.Random) -> Any:
    steps = zoo.definition("xlm_roberta_like")["normalizer"]
    only = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": steps}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **only})).normalizer


NORMALIZERS: tuple[Callable[[random.Random], Any], ...] = (
    *(lambda _, form=form: getattr(normalizers, form)() for form in ("NFC", "NFD", "NFKC", "NFKD")),
    lambda _: normalizers.Lowercase(),
    lambda _: normalizers.StripAccents(),
    lambda _: normalizers.Nmt(),
    lambda choose: normalizers.Strip(choose.random() < 0.5, choose.random() < 0.5),
    lambda _: normalizers.Replace(Regex(r"\s+"), " "),
    lambda _: normalizers.Replace("''", '"'),
    _bert,
    _precompiled,
)
KINDS: dict[str, tuple[Callable[[], Any], Callable[[random.Random, Tokenizer], Any]]] = {
    "byte_level": (models.BPE, _byte_level),
    "byte_fallback": (lambda: models.BPE(unk_token="<unk>", fuse_unk=True), _byte_fallback),
    "unigram": (models.Unigram, _unigram),
    "word_pieces": (lambda: models.WordPiece(unk_token="[UNK]"), _word_pieces),
}
