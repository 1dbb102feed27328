"""Read control tokens, spelling and conventions from a parsed `tokenizer.json`."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from secrets import token_hex
from typing import Any

Definition = dict[str, Any]

SPACE_PIECE = "▁"
CONTROL_MARKUP = re.compile(r"<\||[^｜]*｜", re.DOTALL)
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "<｜▁pad▁｜>")
"""Names of the token that fills rows."""
# Tokens that begin a text, and those that end documents of the same family.
_COUNTERPARTS = {
    "<|begin_of_text|>": "<|end_of_text|>",
    "<｜begin▁of▁sentence｜>": "<｜end▁of▁sentence｜>",
    "<bos>": "<eos>",
    "<s>": "</s>",
    "[CLS]": "[SEP]",
}
# Of these a template without BOS means that texts have none; others often don't name theirs.
_OPTIONAL_BOS = ("<s>", "[CLS]")
# Separators of documents in pretraining, then ends of a chat's turn. A model has seen the latter
# only after its pretraining: before a text they are hardly better than nothing.
_END_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|endofdocument|>", "<|eod|>"),
    *("<eod>", "<eos>", "[EOS]", "<|eos|>", "<EOS_TOKEN>", "</s>", "[SEP]"),
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"),
)

_ASCII_KEEPING_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "ByteLevel"}
_TEXT_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Digits", "UnicodeScripts"}


@dataclass(frozen=True)
class Conventions:
    """Tokens that a model expects around a text, as `Tokenizer` describes them."""

    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool
    adds_eos: bool
    template_before: tuple[int, ...] = ()
    control_names: tuple[str, ...] = ()


def with_model_type(definition: Definition) -> Definition:
    """Fill in the model's type, missing before tokenizers 0.9."""
    model = definition["model"]
    if model.get("type"):
        return definition
    kind = "Unigram" if isinstance(model.get("vocab"), list) else "WordLevel"
    kind = "WordPiece" if "max_input_chars_per_word" in model else kind
    kind = "BPE" if "merges" in model else kind
    return definition | {"model": model | {"type": kind}}


def bare_definition(original: Definition) -> Definition:
    """Remove parts that add tokens or change offsets, such as `trim_offsets`."""
    return original | {"post_processor": None, "truncation": None, "padding": None}


def disarm_control_tokens(definition: Definition) -> tuple[Definition, dict[str, int]]:
    """Rename control tokens, at random, so no text can spell them; also return their ids.

    Without them `tokenizers` (0.23) would shift later added tokens' ids.
    """
    control = control_tokens(definition)
    names = {content: f"{content}{token_hex(16)}" for content in control}
    model = dict(definition["model"])
    if isinstance(model["vocab"], dict):
        made = names.keys() & model["vocab"].keys()
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
        if made and "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if _avoids(pair, made)]
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        token | {"content": names.get(token["content"], token["content"])}
        for token in added_tokens(definition)
    ]
    return definition | {"model": model, "added_tokens": added}, control


def without_gaps(model: Definition) -> Definition:
    """Give unused ids and the empty piece random names that no text spells."""
    vocab = model["vocab"]
    if not isinstance(vocab, dict) or (
        len(vocab) > max(vocab.values(), default=0) and "" not in vocab
    ):
        return model
    missing = set(range(max(vocab.values()))).difference(vocab.values())
    named = {piece or token_hex(16): token_id for piece, token_id in vocab.items()}
    return model | {"vocab": named | {token_hex(16): token_id for token_id in missing}}


def without_metaspace(definition: Definition, added_strings: Sequence[str]) -> Definition:
    """Replace a lone `Metaspace` step by equivalent steps.

    They also put a space after an added token, so scheme "first" stays if texts may hold one.
    """
    step = definition.get("pre_tokenizer") or {}
    default = "always" if step.get("add_prefix_space", True) else "never"
    scheme = step.get("prepend_scheme", default)
    if step.get("type") != "Metaspace" or step.get("replacement", SPACE_PIECE) != SPACE_PIECE:
        return definition
    if scheme == "first" and added_strings:
        return definition
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_PIECE}
    first = {
        "type": "Replace",
        "pattern": {"Regex": rf"\A(?!{SPACE_PIECE})"},
        "content": SPACE_PIECE,
    }
    steps = [*normalizer_steps(definition), spaces, *([] if scheme == "never" else [first])]
    words = {"type": "Split", "pattern": {"String": SPACE_PIECE}, "behavior": "MergedWithNext"}
    return definition | {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": words | {"invert": False} if step.get("split", True) else None,
    }


def _avoids(merge: str | Sequence[str], pieces: Collection[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return not (left in pieces or right in pieces or left + right in pieces)


def added_tokens(definition: Definition) -> list[dict[str, Any]]:
    """Return the added tokens' entries."""
    return definition.get("added_tokens") or []


def added_token(token_id: int, content: str, *, special: bool = True) -> Definition:
    """Return an added token's entry, without special matching."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **plain, "special": special}


def model_pieces(definition: Definition) -> dict[str, int]:
    """Return token strings and ids, without added tokens."""
    vocab = definition["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {piece: place for place, (piece, _) in enumerate(vocab)}


def token_names(definition: Definition) -> dict[int, str]:
    """Return token strings by id, with added tokens."""
    names = {token_id: piece for piece, token_id in model_pieces(definition).items()}
    return names | {token["id"]: token["content"] for token in added_tokens(definition)}


def content_normalizer(definition: Definition) -> Definition:
    """Return a definition that only normalises, without the spelling step `ByteLevel`."""
    rewriting = [step for step in normalizer_steps(definition) if step["type"] != "ByteLevel"]
    normalizer = {"type": "Sequence", "normalizers": rewriting} if rewriting else None
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}


def spells_spaces(definition: Definition) -> bool:
    """Whether `▁` in a token means a space."""
    parts = _parts(definition)
    return not is_byte_level(definition) and ('"Metaspace"' in parts or SPACE_PIECE in parts)


def is_byte_level(definition: Definition) -> bool:
    """Whether tokens are written in GPT-2's alphabet of bytes."""
    return '"ByteLevel"' in _parts(definition)


def normalizer_steps(definition: Definition) -> Iterator[Mapping[str, Any]]:
    """Yield the steps that rewrite a text."""
    return _steps(definition.get("normalizer"), "normalizers")


def pre_tokenizer_steps(definition: Definition) -> Iterator[Definition]:
    """Yield copies of the steps that split a text."""
    for step in _steps(definition.get("pre_tokenizer"), "pretokenizers"):
        yield dict(step)


def keeps_ascii(definition: Definition) -> bool:
    """Whether steps before the model are known to keep ASCII; they may add a space."""
    return all(map(_normalizer_keeps_ascii, normalizer_steps(definition))) and all(
        map(_pre_tokenizer_keeps_text, pre_tokenizer_steps(definition))
    )


def read_conventions(definition: Definition) -> Conventions:
    """Read a model's conventions from its vocabulary and post-processor alone.

    A chat model's `tokenizer_config.json` names the end of a turn, not of a document.
    """
    ids = model_pieces(definition) | {t["content"]: t["id"] for t in added_tokens(definition)}
    control = control_tokens(definition)
    template = read_template(definition.get("post_processor"), ids)
    before, after = template or ([], [])
    bos_name = next((name for name in _COUNTERPARTS if name in control), None)
    bos = before[0] if before else control.get(bos_name or "")
    ends = (_COUNTERPARTS.get(_name_of(bos, control), ""), *_END_NAMES)
    eos = next((control[name] for name in ends if name in control), None)
    return Conventions(
        bos_token_id=bos,
        eos_token_id=after[0] if after and eos is None else eos,
        adds_bos=bos is not None
        and (bool(before) or template is None or bos_name not in _OPTIONAL_BOS),
        adds_eos=bool(after),
        template_before=tuple(before),
        control_names=tuple(control),
    )


def _name_of(token_id: int | None, names: Mapping[str, int]) -> str:
    return next((name for name, number in names.items() if number == token_id), "")


def control_tokens(definition: Definition) -> dict[str, int]:
    """Return the added tokens that a document must not be able to forge.

    These are special tokens and control markup (`<|…` or `…｜…`), such as Qwen's unmarked
    `<|fim_prefix|>`. Others (`<tool_call>`, runs of spaces) are read as text.
    """
    return {
        token["content"]: token["id"]
        for token in added_tokens(definition)
        if token["special"] or CONTROL_MARKUP.match(token["content"])
    }


@lru_cache(maxsize=4)
def any_of(names: tuple[str, ...]) -> re.Pattern[bytes] | None:
    """Return a pattern of any of some strings, the longest first; None without any."""
    texts = [name.encode() for name in sorted(filter(None, names), key=len, reverse=True)]
    return re.compile(b"|".join(map(re.escape, texts))) if texts else None


def _parts(definition: Definition) -> str:
    steps = [definition.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    return json.dumps(steps, ensure_ascii=False)


def _steps(part: Mapping[str, Any] | None, nested: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part[nested]:
        yield from _steps(inner, nested)


def _normalizer_keeps_ascii(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Prepend":
        return bool(step["prepend"] == SPACE_PIECE)
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == SPACE_PIECE)
    return step["type"] in _ASCII_KEEPING_NORMALIZERS


def _pre_tokenizer_keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("replacement", SPACE_PIECE) == SPACE_PIECE)
    if step["type"] in ("Split", "Punctuation"):
        return bool(step.get("behavior", "Isolated") != "Removed")
    return step["type"] in _TEXT_KEEPING_PRE_TOKENIZERS


def puts_space_first(definition: Definition) -> bool:
    """Whether a space may be put before a text, a split, or text after an added token."""
    steps = [*normalizer_steps(definition), *pre_tokenizer_steps(definition)]
    return any(
        step["type"] == "Prepend"
        or step.get("add_prefix_space", False)
        or step.get("prepend_scheme", "never") != "never"
        for step in steps
    )


def read_template(
    processor: Mapping[str, Any] | None, ids: Mapping[str, int]
) -> tuple[list[int], list[int]] | None:
    """Return the tokens before and after a text, None if no processor defines them."""
    for step in _steps(processor, "processors"):
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            return [step["cls"][1]], [step["sep"][1]]
        if step["type"] == "TemplateProcessing":
            before: list[int] = []
            after: list[int] = []
            side = before
            for part in step["single"]:
                if "Sequence" in part:
                    side = after
                else:
                    side += _template_ids(step, part["SpecialToken"]["id"], ids)
            return before, after
    return None


def _template_ids(step: Mapping[str, Any], name: str, ids: Mapping[str, int]) -> list[int]:
    listed = step.get("special_tokens") or {}
    return list(listed[name]["ids"]) if name in listed else [ids[name]]


def text_template(
    before: Sequence[int], after: Sequence[int], names: Mapping[int, str]
) -> Definition:
    """Return the post-processor that puts tokens around a text; `names` are by id."""

    def side(name: str, type_id: int) -> list[Definition]:
        return [
            *({"SpecialToken": {"id": names[i], "type_id": type_id}} for i in before),
            {"Sequence": {"id": name, "type_id": type_id}},
            *({"SpecialToken": {"id": names[i], "type_id": type_id}} for i in after),
        ]

    special = {
        names[i]: {"id": names[i], "ids": [i], "tokens": [names[i]]} for i in (*before, *after)
    }
    return {
        "type": "TemplateProcessing",
        "single": side("A", 0),
        "pair": side("A", 0) + side("B", 1),
        "special_tokens": special,
    }
