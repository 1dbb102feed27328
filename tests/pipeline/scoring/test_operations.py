"""Operations are those that PyTorch counts in a real forward pass of tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV3Config,
    Gemma3Config,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3_5MoeConfig,
    Qwen3MoeConfig,
)

from pipeline.scoring.engines.operations import operations_per_token

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 61,
}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
          "intermediate_size": 16, "image_size": 28}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2}
QWEN = {**SIZES, **ROUTED, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24}
LATENT = {**SIZES, **ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
          "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
          "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
          "first_k_dense_replace": 1}  # fmt: skip
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 61,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2,
                       "hidden_size": 32}}  # fmt: skip
LENGTH = 64

MODELS: dict[str, PreTrainedConfig] = {
    "dense": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
    "Qwen3-MoE, wide heads": Qwen3MoeConfig(**QWEN),
    "Mixtral": MixtralConfig(**SIZES, **ROUTED, num_local_experts=4),
    "DeepSeek-V3, latent attention": DeepseekV3Config(**LATENT),
    "DBRX, experts in ffn_config": DbrxConfig(**DBRX),
    "GraniteMoE, experts by another name": GraniteMoeConfig(**SIZES, **ROUTED, num_local_experts=4),
    "gpt-oss, experts with biases": GptOssConfig(
        **SIZES, **ROUTED, num_local_experts=4, head_dim=16
    ),
    "Gemma 4, layers with other heads": Gemma4TextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "Gemma 3, nested, with a vision tower": Gemma3Config(
        text_config={**SIZES, "head_dim": 16}, vision_config=VISION
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_a_forward_pass(name: str) -> None:
    model: Any = AutoModelForCausalLM.from_config(
        MODELS[name], attn_implementation="eager", experts_implementation="eager"
    )
    model.train(False).requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(1, 60, (1, LENGTH)), use_cache=False)
    counts = {str(key): count for key, count in counter.get_flop_counts()["Global"].items()}
    # Eager attention computes the future, too: twice what is needed.
    attention = counts.pop("aten.bmm")
    operations = operations_per_token(model)
    one = operations(np.array([LENGTH]))
    assert one == sum(counts.values()) + attention / 2
    assert operations(np.array([2 * LENGTH])) == 2 * one + attention


def test_only_layers_that_attend_have_squares() -> None:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24}  # fmt: skip
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3_5MoeConfig(text_config={**QWEN, **linear, "layer_types": kinds})
    operations = operations_per_token(AutoModelForCausalLM.from_config(config))
    twice = operations(np.array([2 * LENGTH])) - 2 * operations(np.array([LENGTH]))
    assert twice == 2 * LENGTH**2 * 4 * (16 + 16)


def test_a_recurrent_model_has_no_squares() -> None:
    config = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4)
    operations = operations_per_token(AutoModelForCausalLM.from_config(config))
    assert operations(np.array([2 * LENGTH])) == 2 * operations(np.array([LENGTH])) > 0
