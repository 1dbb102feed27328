"""Models with fewer layers, against the same layers run where they were."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from pipeline.transfer import vocabulary_layers as transfer_model
from pipeline.transfer.vocabulary_layers import UntransferableError, keep_layers, require_layers

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0},
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
# What each says of its layers one by one.
FAMILIES = {
    "llama": {},
    "smollm3": {},  # no_rope_layers
    "llama4_text": {"intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": [1, 3, 6]},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1, 3, 6]},
    "gemma3_text": {"sliding_window": 4},  # layer_types
}


def _model(family: str, **given: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = {**SIZES, "num_hidden_layers": 8, **given}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_pruned_models_compute_what_the_layers_left_compute(family: str) -> None:
    """The layers between are turned into what passes on its input, so numbers stay as they were."""
    model, layers = _model(family, **FAMILIES[family]), (0, 3, 6, 7)
    ids = torch.randint(64, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        pruned = keep_layers(model, layers)
        found, whole = (one(input_ids=ids, use_cache=False).logits for one in (pruned, model))
        by_hand = copy.deepcopy(model)
        for number in {*range(8)} - {*layers}:
            own = by_hand.model.layers[number]
            own.forward = lambda hidden_states, *_, **__: hidden_states
        expected = by_hand(input_ids=ids, use_cache=False).logits
    assert (pruned.config.num_hidden_layers, model.config.num_hidden_layers) == (4, 8)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(whole, expected, atol=1e-3)


def test_windows_longer_than_the_compared_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 4}
    model = _model("qwen2", **given)
    pruned = keep_layers(model, (0, 3, 6, 7))
    assert pruned.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert pruned.config.sliding_window == model.config.sliding_window == 512
    # As a list that isn't known to be about layers would come out: the first four of eight.
    monkeypatch.setattr(
        transfer_model, "_of_layers", lambda _, values, left, __: values[: len(left)]
    )
    with pytest.raises(UntransferableError, match="Mismatched elements"):
        keep_layers(model, (0, 3, 6, 7))
    assert model.config.sliding_window == 512


def test_an_order_of_ones_own_and_what_else_a_configuration_lists() -> None:
    model = _model("llama", num_hidden_layers=2, eos_token_id=[0, 1])
    model.generation_config = GenerationConfig(temperature=0.5, do_sample=True)
    turned = keep_layers(model, (1, 0, 1))
    assert (turned.config.eos_token_id, turned.config.num_hidden_layers) == ([0, 1], 3)
    assert turned.generation_config.temperature == 0.5
    weights = [model.model.layers[n].mlp.up_proj.weight for n in (1, 0, 1)]
    for layer, weight in zip(turned.model.layers, weights, strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, weight)


def test_layers_that_a_family_refuses_to_be_saved_with_are_refused_at_once() -> None:
    kinds = ["linear_attention", "full_attention"]
    hybrid = _model("olmo_hybrid", num_hidden_layers=2, layer_types=kinds)
    named = r"^--layers 1: OlmoHybridForCausalLM can't have these alone \(.*'linear_attention'"
    with pytest.raises(UntransferableError, match=named):
        require_layers(hybrid, (1,))
    require_layers(hybrid, (1, 0))


def test_layers_that_depend_on_their_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = _model("qwen3_moe", **EXPERTS, decoder_sparse_step=2)
    named = (
        r"Qwen3MoeForCausalLM with layers \[0, 2, 3\] alone isn't what .* state_dict .*only_layers"
    )
    with pytest.raises(UntransferableError, match=named):
        keep_layers(sparse, (0, 2, 3))
    with pytest.raises(UntransferableError, match="--layers 0 9 must be some of 0 … 7"):
        keep_layers(sparse, (0, 9))
    # A multimodal model's configuration counts no layers: its text model's does.
    vision = {"hidden_size": 24, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    parts = {"text_config": {**SIZES, "num_hidden_layers": 2}, "vision_config": vision}
    seeing = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", **parts))
    with pytest.raises(UntransferableError, match=r"doesn't have all layers under 'model.layers"):
        keep_layers(seeing, (0,))
    # A model of somebody's own, whose first layers count for more.
    own = LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **given: Any) -> Any:
        found = own(self, *args, **given)
        found.logits = found.logits * self.config.num_hidden_layers
        return found

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(UntransferableError, match=r"LlamaForCausalLM .* Mismatched elements"):
        keep_layers(_model("llama"), (0, 1))
