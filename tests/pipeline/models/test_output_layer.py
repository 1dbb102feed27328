"""Losses computed from hidden states are those of each model's own logits, or it is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_plugin.models.shape import FAMILIES
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.logits import OutputLayer
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import UnknownLogitsError, output_layer, require_own_losses
from pipeline.models.weights import ForeignCodeError

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
XLSTM = {"embedding_dim": 32, "num_heads": 2, "num_blocks": 2, "chunk_size": 8}
CAPPED = {"final_logit_softcapping": 5.0}
GEMMA4 = SMALL | CAPPED | {
    "model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0,
}  # fmt: skip
GEMMA3N = SMALL | CAPPED | {
    "intermediate_size": [48, 48], "num_kv_shared_layers": 0, "laurel_rank": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    "activation_sparsity_pattern": [0.0, 0.0],
}  # fmt: skip
# model_type: its configuration, and the scale and cap of its logits
FAMILIES_THAT_CHANGE: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "gemma2": ({**CAPPED}, 1.0, 5.0),
    "gemma4_text": ({**CAPPED}, 1.0, 5.0),
    "gemma3n_text": (GEMMA3N, 1.0, 5.0),
    "gemma4": ({"text_config": GEMMA4, "vision_config": None, "audio_config": None}, 1.0, 5.0),
    "recurrent_gemma": (
        {"lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 16,
         "logits_soft_cap": 5.0}, 1.0, 5.0,
    ),
    "xlstm": ({**XLSTM, "output_logit_soft_cap": 5.0}, 1.0, 5.0),
    "granite": ({"logits_scaling": 8.0}, 0.125, None),
    "hyperclovax": ({"logits_scaling": 0.125}, 0.125, None),
    "cohere2": ({"logit_scale": 0.25}, 0.25, None),
    "falcon_h1": ({"lm_head_multiplier": 0.25, **MAMBA}, 0.25, None),
}  # fmt: skip


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a model whose logits are large enough for a cap to be felt."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(family, **(SMALL | changes))
        model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model.eval()


def losses_of(model: PreTrainedModel, layer: OutputLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 23 tokens' losses as they are computed here, and by the model's own logits."""
    ids = torch.randint(64, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        own = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found = linear_cross_entropy(hidden, layer, ids[0, 1:]).losses
    return found.detach(), cross_entropy(own, ids[0, 1:], reduction="none")


@pytest.mark.parametrize("family", FAMILIES_THAT_CHANGE)
def test_what_a_family_does_to_its_logits_is_done_here_too(family: str) -> None:
    changes, scale, cap = FAMILIES_THAT_CHANGE[family]
    model = make_model(family, **changes)
    layer = output_layer(model)
    assert (layer.scale, layer.cap) == (scale, cap)
    found, own = losses_of(model, layer)
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
    plain, _ = losses_of(model, OutputLayer(layer.weight))
    assert float((plain - own).abs().mean()) > 0.1, "a model on which it makes no difference"
    require_own_losses(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_s_families_change_nothing(family: str) -> None:
    """The plugin computes losses of weights alone, so their logits must be mere products."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make_model(family, **experts)
    layer = output_layer(model)
    assert (layer.scale, layer.cap) == (1.0, None)
    require_own_losses(model)


def test_a_model_whose_logits_are_computed_otherwise_is_refused() -> None:
    """As a family of the future may."""
    model = make_model("llama")
    own = model.forward

    def forward(*arguments: Any, **more: Any) -> Any:
        output = own(*arguments, **more)
        output.logits = output.logits * 0.5
        return output

    model.forward = forward  # type: ignore[method-assign]
    message = (
        r"LlamaForCausalLM \(llama\) computes its logits in a way that isn't known here: 16 tokens "
        r"have a mean loss of \d\.\d{4} nats by its own logits and of \d\.\d{4} by its hidden "
        r"states.*as a teacher, serve the model"
    )
    with pytest.raises(UnknownLogitsError, match=message):
        require_own_losses(model)


class ScaledOutput(torch.nn.Linear):
    """As Dory's: a learned scale for each token."""

    def __init__(self) -> None:
        super().__init__(32, 64, bias=False)
        self.logit_scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states).float() * self.logit_scale.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_layer_with_more_than_weights_is_refused(dtype: torch.dtype) -> None:
    """A new one's scale is 1, so its losses are equal; it would get no gradient."""
    model = make_model("llama")
    model.lm_head = ScaledOutput()
    with pytest.raises(UnknownLogitsError, match="a bias or a scale for each token"):
        require_own_losses(model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "given"),
    [("gemma3_text", {"use_bidirectional_attention": True}), ("llama", {"is_causal": False})],
)
def test_a_model_that_sees_what_it_is_to_predict_is_refused(
    family: str, given: dict[str, Any], dtype: torch.dtype
) -> None:
    """Such as EmbeddingGemma, whose documents in packed rows keep apart."""
    require_own_losses(make_model(family).to(dtype))
    with pytest.raises(UnknownLogitsError, match="reads texts in both directions"):
        require_own_losses(make_model(family, **given).to(dtype))


def test_a_model_without_a_decoder_of_its_own_is_refused_in_a_sentence() -> None:
    """Llama 4's text model gives no hidden states by the name that transformers says."""
    model = make_model("llama4_text", intermediate_size_mlp=48, num_local_experts=2)
    message = r"^Llama4ForCausalLM \(llama4_text\): its code in transformers .* AttributeError: "
    with pytest.raises(ForeignCodeError, match=message):
        require_own_losses(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 logits are rounded to tenths; they are compared before they are."""
    model = make_model("gemma2", final_logit_softcapping=20.0).to(dtype).train()
    require_own_losses(model)
    assert model.training, "as it was"
    monkeypatch.setattr("pipeline.models.output_layer._CAPS", ())
    with pytest.raises(UnknownLogitsError, match=r"cap None\), 0\.\d+ apart per token"):
        require_own_losses(model)


def test_a_bias_is_refused() -> None:
    model = make_model("llama")
    model.lm_head = torch.nn.Linear(32, 64)
    with pytest.raises(UnknownLogitsError, match="no output layer, or one with a bias"):
        require_own_losses(model)


def test_a_model_that_is_loaded_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("granite", logits_scaling=8.0).save_pretrained(tmp_path)
    assert output_layer(load_language_model(str(tmp_path))).scale == 0.125
    monkeypatch.setattr("pipeline.models.output_layer._DIVISORS", ())
    with pytest.raises(UnknownLogitsError, match=r"GraniteForCausalLM \(granite\)"):
        load_language_model(str(tmp_path))
