"""Pattern, control tokens and normaliser of models with tiktoken files, from the models' code.

Files are known by SHA-256: others may need another pattern.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RankModel:
    """Facts from a model's code that its tiktoken file lacks.

    Each match of the pattern is encoded on its own. Control tokens are by id, or follow the ranks
    in order; the normaliser is "NFC" or None.
    """

    name: str
    pattern: str
    control_tokens: Sequence[str] | Mapping[str, int]
    normalizer: str | None = None
    bos_token: str | None = None


def _reserved(prefix: str, first: int, count: int) -> list[str]:
    return [f"<|{prefix}reserved_special_token_{first + place}|>" for place in range(count)]


def _llama_4_control_tokens() -> list[str]:
    text, vision, reasoning = "text_post_train_", "vision_", "reasoning_"
    tokens = [
        *("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>"),
        *("<|fim_suffix|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
        *_reserved(text, 0, 6),
        *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
        *_reserved(text, 8, 61),
        *("<|image_start|>", "<|image_end|>"),
        *_reserved(vision, 0, 2),
        *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        *_reserved(vision, 2, 4),
        "<|image|>",
        *_reserved(vision, 6, 1),
        "<|patch|>",
        *_reserved(vision, 7, 1041),
        *_reserved(reasoning, 0, 8),
        *("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
    ]
    return [*tokens, *_reserved("", 0, 2048 - len(tokens))]


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_WORDS = rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+"
_CASED_WORDS = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
)

_FIM = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

LLAMA_3 = RankModel(
    "Llama 3",
    pattern=rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_OTHERS}",
    control_tokens=(
        *("<|begin_of_text|>", "<|end_of_text|>", *_reserved("", 0, 2)),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>", *_reserved("", 2, 244)),
    ),
    bos_token="<|begin_of_text|>",
)
LLAMA_4 = RankModel(
    "Llama 4",
    pattern=rf"{_CASED_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_OTHERS}",
    control_tokens=_llama_4_control_tokens(),
    bos_token="<|begin_of_text|>",
)
QWEN = RankModel(
    "Qwen",
    pattern=rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_OTHERS}",
    control_tokens=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *(f"<|extra_{place}|>" for place in range(205)),
    ),
    normalizer="NFC",
)
R50K = RankModel(
    "r50k_base",
    pattern=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    control_tokens={"<|endoftext|>": 50256},
)
P50K = replace(R50K, name="p50k_base")
CL100K = RankModel(
    "cl100k_base",
    # As first published. tiktoken's today differs only in white space after the last line's end,
    # which no token of the file spans.
    pattern=LLAMA_3.pattern,
    control_tokens={name: 100257 + n for n, name in enumerate(_FIM)} | {"<|endofprompt|>": 100276},
)
O200K = RankModel(
    "o200k_base", LLAMA_4.pattern, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}
)
BYTES = RankModel(
    "bytes",
    # Without merges it makes no difference where texts are split; this pattern has a fast path.
    pattern=QWEN.pattern,
    control_tokens=("<|endoftext|>", "<|pad|>"),
)
"""No model's: the 256 byte values, each a token."""

KNOWN_RANK_FILES: Mapping[str, RankModel] = {
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": LLAMA_3,
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": LLAMA_4,
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": QWEN,
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": R50K,
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": P50K,
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": CL100K,
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": O200K,
}
"""By the SHA-256 of their files."""
