"""Models of transformers written as .gguf files, as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers import AutoModelForCausalLM as AnyModel

VOCAB_SIZE = 64
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
}


def make_model(kind: str, **config: Any) -> PreTrainedModel:
    """Return a model with random weights whose losses show each of them."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    model: PreTrainedModel = AnyModel.from_config(CONFIG_MAPPING[kind](**{**sizes, **config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 1))
    return model.eval()


def write_model_as_gguf(
    file: Path,
    model: Any,
    family: str,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model as a file of an architecture, with further keys and tensors."""
    gguf = pytest.importorskip("gguf", reason="needs vocag[packaged-teacher]")
    config, writer = model.config, gguf.GGUFWriter(file, family)
    head_size = getattr(config, "head_dim", None) or 8
    given = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "vocab_size": VOCAB_SIZE,
        **(keys or {}),
    }
    for name, value in given.items():
        add = {float: writer.add_float32, str: writer.add_string}.get(type(value))
        (add or writer.add_uint32)(f"{family}.{name}", value)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(_name_of(name, family), _value_of(name, weight, model, family))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _name_of(name: str, family: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    parts = _PARTS | (_GEMMA_PARTS if family.startswith("gemma") else {})
    return f"blk.{layer}.{parts[part]}.{kind}"


def _value_of(name: str, weight: torch.Tensor, model: Any, family: str) -> Any:
    values = weight.float().numpy()
    if family.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        # Its halves of each head are interleaved, as Meta's own code rotates them.
        heads = model.config.num_attention_heads
        heads = heads if "q_proj" in name else model.config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)
