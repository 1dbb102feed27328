"""Operations are two for each weight that a token meets, and attention's, by plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV3Config,
    Gemma3Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from pipeline.scoring.engines.operations import operations_per_token

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {**SIZES, **ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
          "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
          "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 61,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2,
                       "hidden_size": 32}}  # fmt: skip
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
          "intermediate_size": 16, "image_size": 28}  # fmt: skip
OUTPUT = 32 * 61
QUERIES_AND_KEYS = 32 * 32 + 2 * 32 * 16 + 32 * 32

# Configuration; weights that a token meets, and columns of all heads' keys and values.
MODELS: dict[str, tuple[PreTrainedConfig, int, int]] = {
    "dense": (
        LlamaConfig(**SIZES),
        OUTPUT + 2 * (QUERIES_AND_KEYS + 3 * 32 * 48),
        2 * (32 + 32),
    ),
    "wide heads, experts": (
        Qwen3MoeConfig(**SIZES, **ROUTED, head_dim=16, num_experts=4),
        OUTPUT + 2 * (2 * 32 * 64 + 2 * 32 * 32 + 4 * 32 + 2 * 3 * 32 * 24),
        2 * (64 + 64),
    ),
    "latent attention, a dense layer, a shared expert": (
        DeepseekV3Config(**LATENT),
        OUTPUT
        + 2 * (32 * 16 + 16 * 4 * 16 + 32 * (16 + 8) + 16 * 4 * (8 + 12) + 4 * 12 * 32)
        + 3 * 32 * 48
        + (4 * 32 + 3 * 3 * 32 * 24),
        2 * 4 * (16 + 12),
    ),
    "experts in a nested configuration": (
        DbrxConfig(**DBRX),
        OUTPUT + 2 * (QUERIES_AND_KEYS + 4 * 32 + 2 * 3 * 32 * 48),
        2 * (32 + 32),
    ),
    "text in a nested configuration": (
        Gemma3Config(text_config={**SIZES, "head_dim": 16}, vision_config=VISION),
        OUTPUT + 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48),
        2 * (64 + 64),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_weights_and_causal_attention(name: str) -> None:
    config, weights, columns = MODELS[name]
    model = AutoModelForCausalLM.from_config(config).train(False).requires_grad_(False)
    attention = model.config._attn_implementation
    operations = operations_per_token(model)
    lengths = np.array([64, 1, 300])
    assert operations(lengths) == 2 * weights * lengths.sum() + columns * (lengths**2).sum()
    assert model.config._attn_implementation == attention, "as it was"


def test_a_recurrent_model_has_hardly_any_squares() -> None:
    config = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config).train(False).requires_grad_(False)
    operations = operations_per_token(model)
    assert operations(np.array([128])) == pytest.approx(2 * operations(np.array([64])), rel=0.01)
