"""Tiny random models in Hugging Face's format, one per supported family."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
# By name, the type of model in transformers and what its configuration adds.
FAMILIES = {
    "llama": ("llama", {}),
    "llama_scaled": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe_mixed": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}),
}


def make_model(family: str, *, vocab_size: int = 300, seed: int = 0, **changes) -> PreTrainedModel:
    """Return a model with random weights, large enough that each of them shows in the losses."""
    kind, own = FAMILIES[family]
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**sizes, **own, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.15)
    return model


def save_model(folder: Path, family: str, **changes) -> PreTrainedModel:
    """Write a random model to a folder, in several files, and return it."""
    model = make_model(family, **changes)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model
