"""Teachers that are mixtures of experts score as any other, through transformers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.transformers import Scorer
from pipeline.scoring.sidecars import DocumentTokens

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
FAMILIES = ("Qwen3-MoE", "Mixtral", "DeepSeek-V3")


def make_model(family: str, vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(3)
    common = COMMON | {"vocab_size": vocab_size}
    if family == "Qwen3-MoE":
        config = Qwen3MoeConfig(**common, num_experts=4, moe_intermediate_size=24, head_dim=8)
        return Qwen3MoeForCausalLM(config)
    if family == "Mixtral":
        return MixtralForCausalLM(MixtralConfig(**common, num_local_experts=4))
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
    config = DeepseekV3Config(
        **common | {"num_key_value_heads": 4},
        **latent,
        **experts,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_one_pass_per_document(family: str) -> None:
    model = make_model(family, 61)
    lengths = [17, 40, 39, 3]
    starts = np.cumsum([0, *lengths])
    ids = np.random.default_rng(0).integers(0, 61, starts[-1])
    rule = ContextRule(
        seq_length=64,
        teacher_seq_length=64,
        first_token_id=0,
        continued_token_id=0,
        student_added_tokens=(0, 0, 0),
    )
    pieces = Pieces(np.arange(4), np.zeros(4, np.int64), np.array(lengths), np.zeros(4, np.bool_))
    scored = Scorer(model, rule).score(DocumentTokens(ids, starts), pieces)
    expected = []
    for start, stop in pairwise(starts):
        line = torch.tensor([[0, *ids[start:stop].tolist()]])
        with torch.no_grad():
            logits = model(input_ids=line).logits[0].double()
        places = torch.arange(line.shape[1] - 1)
        expected.append(-logits.log_softmax(-1)[places, line[0, 1:]])
    np.testing.assert_allclose(scored.losses, torch.cat(expected), rtol=0, atol=2e-5)
