"""Tokenizers to try: real ones, those of the tests, and others made afresh from a seed."""

import json
import random
from copy import deepcopy
from io import BytesIO
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support import tokenizer_zoo as zoo
from tests.support.split_patterns import SPLIT_PATTERNS, byte_level

REAL = (
    *(name for name in zoo.SHARED_NAMES if (zoo.SHARED / name).is_dir()),
    *(*zoo.PACKAGED, "tekken_240911", "mistral_instruct_tokenizer_241114.model.v7"),
)
SMALL = (*zoo.SMALL, *zoo.NORMALIZING)
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Replace", "Strip")
WORD_SPLITTERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")
OTHERS = ("llama_like", "unigram", "word_pieces")
WHOLE = ("gpt2_like", *zoo.NORMALIZING)
"""Taken as they are, but for the tokens added to them."""
ADDED = (
    *("  ", "    ", "ab", "\n\n", "<x>", "<|im_x|>", "<TOOL>", "é", "e\u0301", "Ａ", " the", "▁▁"),
    *("1", "한", "\u0301", "[MASK]", "ﬁ", "don't", "\u3000", "a b", "ſ", "<s>", "hello", "Hello"),
    *("▁▁▁", "▁the", " sum", "sum"),
)


CONTROL = ("[gMASK]", "<sop>", "<|endoftext|>")


def write_fresh(seed: str, folder: Path) -> Path:
    """Make a tokenizer that its seed describes, and write it.

    Its vocabulary is one of the tests' own; what comes before its model is drawn.
    """
    choose = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if choose.random() < 0.25:
        return _write_sentencepiece(choose, folder / "tokenizer.model")
    name = choose.choice(("qwen_like", "qwen_like", "byte_incomplete", *OTHERS, *WHOLE))
    body = deepcopy(zoo.definition(name))
    if name in WHOLE:
        return _write(body, choose, folder)
    if name not in OTHERS:
        body |= {"normalizer": None, "pre_tokenizer": _byte_level(choose), "added_tokens": []}
    elif name == "word_pieces":
        body |= {"normalizer": None, "pre_tokenizer": {"type": choose.choice(WORD_SPLITTERS)}}
    elif choose.random() < 0.5:
        scheme, split = choose.choice(("always", "first", "never")), choose.random() < 0.7
        splitter = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}
        body |= {"normalizer": None, "pre_tokenizer": splitter | {"split": split}}
    names = choose.choices((*NORMALIZERS, "BertNormalizer", "Precompiled"), k=3)
    steps = [_normalizer(choose, name) for name in names[: choose.choice((0, 0, 1, 1, 2, 3))]]
    if steps:
        steps += [body["normalizer"]] if body["normalizer"] else []
        choose.shuffle(steps)
        body["normalizer"] = {"type": "Sequence", "normalizers": steps}
    return _write(body, choose, folder)


def _write(body: zoo.Definition, choose: random.Random, folder: Path) -> Path:
    """Write a tokenizer with some added tokens."""
    tokenizer = Tokenizer.from_str(json.dumps(body))
    for content in choose.sample(ADDED, choose.choice((0, 0, 2, 4, 6, 8))):
        names = ["single_word", "lstrip", "rstrip", "special", "normalized"]
        flags = {name: choose.random() < 0.35 for name in names}
        tokenizer.add_tokens([AddedToken(content, **flags)])
    if choose.random() < 0.3:  # as GLM's, which puts two tokens before a text
        names = choose.sample(CONTROL, choose.choice((1, 2, 3)))
        tokenizer.add_special_tokens(names)
        ids = [(name, tokenizer.token_to_id(name)) for name in names]
        single = " ".join([*names, "$A"])
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    return zoo.write_definition(json.loads(tokenizer.to_str()), folder)


def _write_sentencepiece(choose: random.Random, path: Path) -> Path:
    flags = ("byte_fallback", "treat_whitespace_as_suffix", "split_digits")
    rule = choose.choice(("nmt_nfkc", "nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"))
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(zoo.SENTENCES * 20),
        model_writer=model,
        model_type=choose.choice(("unigram", "bpe", "word", "char")),
        vocab_size=420,
        hard_vocab_limit=False,
        normalization_rule_name=rule,
        remove_extra_whitespaces=choose.random() < 0.7,
        add_dummy_prefix=choose.random() < 0.7,
        user_defined_symbols=choose.sample(("<x>", "ab", "é", "1", "数"), choose.choice((0, 0, 3))),
        num_threads=1,
        minloglevel=2,
        **{name: choose.random() < 0.3 for name in flags},
    )
    path.write_bytes(model.getvalue())
    return path


def _byte_level(choose: random.Random) -> zoo.Definition:
    splitter: zoo.Definition = byte_level(SPLIT_PATTERNS[choose.choice([*SPLIT_PATTERNS])])
    splitter = splitter["pre_tokenizer"]
    steps = splitter.get("pretokenizers", [splitter])
    steps[-1]["add_prefix_space"] = choose.random() < 0.3
    if choose.random() < 0.3:
        digits = {"type": "Digits", "individual_digits": True}
        steps.insert(0, choose.choice((digits, {"type": "Punctuation", "behavior": "Contiguous"})))
    return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else splitter


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
