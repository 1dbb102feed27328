"""Tiny Hugging Face models in folders of their own, with their tokenizers next to them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.tokenization import Tokenizer
from pipeline.tokenization.definition import token_names

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


def make_llama(num_rows: int, *, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Return a random model, of two layers and 16 states unless told otherwise."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    given = {"num_hidden_layers": 2, "initializer_range": 0.2, **sizes, **changes}
    return LlamaForCausalLM(LlamaConfig(vocab_size=num_rows, **given)).eval()


def write_model(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    width: int = 32,
    num_rows: int | None = None,
) -> Path:
    """Write a randomly initialised model of two layers and its tokenizer; return the folder."""
    model = make_llama(
        num_rows or tokenizer.vocab_size,
        seed=seed,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    (folder / tokenizer.file_name).write_bytes(tokenizer.file_bytes)
    return folder


def write_gguf(file: Path, tokenizer: Tokenizer) -> Path:
    """Write a randomly initialised model of one layer with the ends of `make_instruct`."""
    gguf = pytest.importorskip("gguf", reason="needs vocag[packaged-teacher]")
    writer, generator = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
    definition = json.loads(tokenizer.file_bytes)
    names = token_names(definition)
    end = tokenizer.find_token("<|im_end|>")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(names))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([names[token] for token in range(len(names))])
    writer.add_token_merges([" ".join(pair) for pair in definition["model"]["merges"]])
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_chat_template(f"gguf {CHAT_TEMPLATE}")
    shapes = {"token_embd": (len(names), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (64, 32) for name in ("gate", "up")}
    shapes |= {"blk.0.ffn_down": (32, 64), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
