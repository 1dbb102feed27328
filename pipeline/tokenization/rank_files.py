"""Convert rank files to `tokenizer.json`: tiktoken's (OpenAI, Llama 3 and 4, Qwen), tekken.

They list tokens in the order in which BPE learned them; `tokenizers` needs every pair that makes a
token, in that order. Equal ranks give equal bytes, whose hash identifies the tokenizer.

A tiktoken file lacks the splitting pattern and control tokens: published files are known by hash,
others need `convert_ranks`.
"""

import re
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

import orjson

from pipeline.tokenization.contents import write_byte_level
from pipeline.tokenization.definition import Definition, added_token, text_template
from pipeline.tokenization.rank_models import BYTES, KNOWN_RANK_FILES, RankModel

Ranks = Mapping[bytes, int]

_RANK_LINES = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
_TEKKEN_CONTROL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


class RankFileError(ValueError):
    """A rank file cannot be converted."""


def is_tiktoken(data: bytes) -> bool:
    """Whether a file's first line is a base64 token with its rank."""
    return _RANK_LINES.match(data) is not None


def is_tekken(body: Any) -> bool:
    """Whether a parsed JSON file is a tekken tokenizer."""
    config = body.get("config") if isinstance(body, dict) else None
    return isinstance(config, dict) and "pattern" in config and isinstance(body.get("vocab"), list)


def read_ranks(data: bytes) -> dict[bytes, int]:
    r"""Read a tiktoken file's ranks by token; RankFileError for an invalid line.

    Example:
        >>> read_ranks(b"IQ== 0\nIg== 1\n")
        {b'!': 0, b'"': 1}
    """
    ranks = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise RankFileError(
                f"line {number} isn't a base64 token and rank ({error}): download the file again"
            ) from error
    return ranks


def convert_tiktoken(data: bytes) -> bytes:
    """Convert a known tiktoken file to a `tokenizer.json` that encodes as its model's code does.

    Raises:
        RankFileError: unknown or damaged.
    """
    model = KNOWN_RANK_FILES.get(sha256(data).hexdigest())
    if model is None:
        known = ", ".join(known.name for known in KNOWN_RANK_FILES.values())
        raise RankFileError(
            f"its {len(data.splitlines())} tiktoken ranks are none of those known here ({known}), "
            "and a rank file holds no pattern: take pattern, control tokens and normaliser from "
            "the model's own code, and in Python write what "
            "pipeline.tokenization.rank_files gives as "
            "convert_ranks(read_ranks(data), RankModel(name, pattern, control_tokens, normalizer)) "
            "to a tokenizer.json"
        )
    return convert_ranks(read_ranks(data), model)


def byte_tokenizer() -> bytes:
    """Return a `tokenizer.json` whose tokens are the byte values: id 65 is b"A"."""
    return convert_ranks({bytes([byte]): byte for byte in range(256)}, BYTES)


def convert_ranks(ranks: Ranks, model: RankModel) -> bytes:
    """Convert tiktoken ranks to a `tokenizer.json`; control tokens without ids get the next ones.

    Raises:
        RankFileError: ranks aren't the first ids that control tokens leave free, or a single byte
            isn't a token.
    """
    control = model.control_tokens
    if isinstance(control, Mapping):  # in the vocabulary, too: only there ids may have gaps
        pieces = _pieces(ranks, set(control.values()))
        return _definition(model, {**control, **pieces}, merges_of(pieces), control)
    pieces = _pieces(ranks)
    following = {token: len(ranks) + place for place, token in enumerate(control)}
    return _definition(model, pieces, merges_of(pieces), following)


def convert_tekken(body: Any) -> bytes:
    """Convert parsed tekken JSON to a `tokenizer.json` that encodes as `mistral-common` does.

    Vocabulary beyond the model's size is left out, as there.

    Raises:
        RankFileError: a field is missing or the control tokens do not fit.
    """
    try:
        config = body["config"]
        num_control = int(config["default_num_special_tokens"])
        num_ranks = int(config["default_vocab_size"]) - num_control
        control = _tekken_control_tokens(body.get("special_tokens"), num_control)
        ranks = {b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in body["vocab"]}
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise RankFileError(f"it isn't a readable tekken file: {error!r}") from error
    ranks = {token: rank for token, rank in ranks.items() if rank < num_ranks}
    if len(ranks) != num_ranks:
        raise RankFileError(
            f"it lists {len(ranks)} tokens of {num_ranks} (default_vocab_size less "
            "default_num_special_tokens): download the file again"
        )
    pieces = _pieces(ranks)
    vocabulary = {piece: num_control + rank for piece, rank in pieces.items()}
    clash = vocabulary.keys() & control.keys()
    if clash:
        raise RankFileError(f"{sorted(clash)[:3]} are both control tokens and vocabulary")
    if "<s>" not in control:
        raise RankFileError(f"it has no control token <s> among {list(control)[:3]}…")
    model = RankModel("tekken", pattern, list(control), bos_token="<s>")
    return _definition(model, control | vocabulary, merges_of(pieces), control)


def _tekken_control_tokens(listed: Any, count: int) -> dict[str, int]:
    """Return control tokens' ids; unnamed ids are filled as Mistral does."""
    if listed is None:  # files before version 8 rely on the library's list
        names = dict(enumerate(_TEKKEN_CONTROL_TOKENS))
    else:
        names = {int(token["rank"]): str(token["token_str"]) for token in listed}
    tokens = {names.get(place, f"<SPECIAL_{place}>"): place for place in range(count)}
    if len(tokens) != count or max(names, default=0) >= count:
        raise RankFileError(
            f"its {len(names)} special tokens do not fit default_num_special_tokens {count}"
        )
    return tokens


def _pieces(ranks: Ranks, taken: Collection[int] = ()) -> dict[str, int]:
    """Return ranks by token in byte-level BPE's alphabet; taken ids are no ranks."""
    ordered = sorted(ranks.items(), key=lambda entry: entry[1])
    num_ids = len(ordered) + len(taken)
    free = [rank for rank in range(num_ids) if rank not in taken][: len(ordered)]
    if [rank for _, rank in ordered] != free:
        raise RankFileError(
            f"its {len(ordered)} ranks are not 0 to {max(free)}, each once and no control "
            "token's: the library would give tokens different ids"
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise RankFileError(f"single bytes {missing[:5]} aren't tokens: a text with them fails")
    return {write_byte_level(token): rank for token, rank in ordered}


def merges_of(pieces: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, by the rank of the result.

    tiktoken takes the leftmost of equal joints, `tokenizers` the pair listed first: no case
    differed.
    """
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _definition(
    model: RankModel,
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    control: Mapping[str, int],
) -> bytes:
    split = {"type": "Split", "pattern": {"Regex": model.pattern}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    bos = model.bos_token
    template = None if bos is None else text_template([control[bos]], [], {control[bos]: bos})
    definition: Definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(token_id, token) for token, token_id in control.items()],
        "normalizer": None if model.normalizer is None else {"type": model.normalizer},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, byte_level | {"use_regex": False}],
        },
        "post_processor": template,
        "decoder": byte_level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is that token
            "vocab": dict(vocabulary),
            "merges": list(merges),
        },
    }
    return orjson.dumps(definition)
