"""A .gguf file's model is the model that it was made of, or the file is refused by name."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs vocag[packaged-teacher]")

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.models.gguf_files import FAMILIES, GgufFile, UnreadGgufError, read_gguf_config
from pipeline.models.hf_models import load_language_model
from pipeline.models.weights import UnfittingWeightsError
from tests.support.gguf_models import VOCAB_SIZE, make_model, write_model_as_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
SCALED = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
MILLION = {"rope.freq_base": 1e6}
WINDOW = {"attention.sliding_window": 16}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
WIDE = {"attention.key_length": 256, "attention.value_length": 256}
GEMMA = {"sliding_window": 16, "head_dim": 256}


def of_gemma3(**full: Any) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": 1e4}
    whole = {"rope_type": "default", "rope_theta": 1e6} | full
    return {"rope_parameters": {"sliding_attention": local, "full_attention": whole}}


# name: architecture, kind of model, its configuration, keys that the file has for it
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"rope.freq_base": 5e4, "rope.dimension_count": 8},
    ),
    "llama 3.1": ("llama", "llama", {"rope_parameters": LLAMA3}, {"rope.freq_base": 5e5}),
    "mistral": ("llama", "mistral", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": LINEAR}, MILLION | SCALED),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        MILLION,
    ),
    "gemma2": ("gemma2", "gemma2", GEMMA, WINDOW),
    "gemma2 with other caps": ("gemma2", "gemma2", GEMMA | CAPS, WINDOW | CAPS),
    "gemma3 1B": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7} | of_gemma3(),
        MILLION | WINDOW,
    ),
    "gemma3 4B": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7} | of_gemma3(rope_type="linear", factor=4.0),
        MILLION | WINDOW | SCALED,
    ),
}


def losses(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(VOCAB_SIZE, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")


def rope_factors(model: Any) -> dict[str, Tensor]:
    """Return the tensor by which llama.cpp scales a Llama's frequencies."""
    rope = model.config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return {}
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, 8, 2) / 8)
    return {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_s_model_is_the_model(name: str, tmp_path: Path) -> None:
    """And stays it when it is saved, as a student is."""
    family, kind, config, keys = MODELS[name]
    model = make_model(kind, **config)
    tensors = rope_factors(model)
    assert bool(tensors) == (name == "llama 3.1")
    file = write_model_as_gguf(tmp_path / "m.gguf", model, family, keys=keys, tensors=tensors)
    found = load_language_model(str(file))
    torch.testing.assert_close(losses(found), losses(model), rtol=0, atol=2e-4)
    found.save_pretrained(tmp_path / "saved")
    saved = load_language_model(str(tmp_path / "saved"))
    torch.testing.assert_close(losses(saved), losses(model), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_queries_otherwise(
    family: str, layers: int, tmp_path: Path
) -> None:
    """Which no key says: llama.cpp knows them by their layers."""
    keys = {"block_count": layers, **WINDOW}
    file = write_model_as_gguf(tmp_path / "m.gguf", make_model("llama"), family, keys=keys)
    assert read_gguf_config(GgufFile(file)).query_pre_attn_scalar == 32 / 4


def test_every_supported_family_was_compared() -> None:
    assert {family for family, *_ in MODELS.values()} == {*FAMILIES}


@pytest.mark.parametrize(
    ("family", "keys", "tensors", "message"),
    [
        ("llama", {"logit_scale": 0.5}, {}, "llama.logit_scale 0.5 isn't read"),
        ("llama", {"expert_count": 8}, {}, "llama.expert_count 8 isn't read"),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            {},
            "qwen2.rope.scaling.type yarn by 4.0 isn't read",
        ),
        ("qwen3", {"rope.dimension_count": 4}, {}, "qwen3.rope.dimension_count 4 differs from 8"),
        ("gemma2", WINDOW, {}, "gemma2.attention.key_length 8 isn't 256"),
        ("gemma2", WIDE, {}, "key gemma2.attention.sliding_window is missing"),
        (
            "llama",
            {},
            {"rope_freqs.weight": [1.0, 2.0, 1.0, 3.0]},
            "tensor rope_freqs.weight holds another scaling than Llama 3's",
        ),
        (
            "llama",
            {},
            {"blk.0.attn_q.bias": [1.0] * 32, "blk.1.attn_q.bias": [1.0] * 32},
            r"tensor blk.0.attn_q.bias \(of 2\) is none of its model's",
        ),
        ("phi3", {}, {}, "architecture phi3 isn't one of llama, qwen2, qwen3, gemma2, gemma3"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    family: str, keys: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind = family if family in ("qwen2", "qwen3", "gemma2") else "llama"
    model = make_model(kind)
    file = write_model_as_gguf(tmp_path / "m.gguf", model, family, keys=keys, tensors=tensors)
    with pytest.raises(UnreadGgufError, match=f"^{file}: {message}"):
        load_language_model(str(file))


def test_a_lost_tensor_is_named(tmp_path: Path) -> None:
    model = make_model("llama", num_hidden_layers=1)
    file = write_model_as_gguf(tmp_path / "m.gguf", model, "llama", keys={"block_count": 2})
    message = r"9 missing \(model.layers.1.input_layernorm.weight"
    with pytest.raises(UnfittingWeightsError, match=message):
        load_language_model(str(file))
