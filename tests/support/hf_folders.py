"""Tiny Hugging Face models in folders of their own, with their tokenizers beside them."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.tokenization import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n"
    "{% endfor %}{{ bos_token }}"
)


def make_instruct(folder: Path, tokenizer: Tokenizer, *, layout: str = "config") -> Path:
    """Make a model's folder that of an instruct model: turns end with <|im_end|>."""
    turn = tokenizer.find_token("<|im_end|>")
    settings = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    ends = {"eos_token_id": [tokenizer.eos_token_id, turn], "bos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings | ends))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}
    own |= {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}
    tool = f"tools {CHAT_TEMPLATE}"
    if layout == "config":
        own |= {"chat_template": CHAT_TEMPLATE}
    elif layout == "list":
        named = {"default": CHAT_TEMPLATE, "tool": tool}
        own |= {"chat_template": [{"name": n, "template": t} for n, t in named.items()]}
    else:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if layout == "more jinja":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool.jinja").write_text(tool)
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def write_model(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    width: int = 32,
    num_rows: int | None = None,
) -> Path:
    """Write a randomly initialised model of two layers and its tokenizer; return the folder."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_rows or tokenizer.vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    (folder / tokenizer.file_name).write_bytes(tokenizer.file_bytes)
    return folder
