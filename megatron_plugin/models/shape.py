"""A decoder's shape, from its Hugging Face config, in Megatron's terms."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_ROPE_TYPES = ("default", "linear", "llama3")


class UnsupportedModelError(ValueError):
    """A model has an untranslated part, which training would change."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    `count` is per layer; with `renormalised`, a token's weights add up to 1; `layers` marks the
    layers with experts.
    """

    count: int
    per_token: int
    ffn_hidden_size: int
    renormalised: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder.

    `ffn_hidden_size` is of dense layers, `vocab_size` excludes padding, `rotary_base` is θ,
    `sliding_window` counts tokens, None for all, `config` is for export and rope scaling.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    layernorm_epsilon: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_layernorm: bool
    rotary_base: float
    max_position_embeddings: int
    sliding_window: int | None
    config: dict[str, Any]
    experts: Experts | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Values named alike in Megatron's arguments and configuration."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_size,
            "layernorm_epsilon": self.layernorm_epsilon,
            "normalization": "RMSNorm",
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_layernorm,
        }

    @property
    def weights_per_layer(self) -> float:
        """Weights that multiply each token, the mean over layers."""
        width, router = float(self.ffn_hidden_size), 0.0  # of a token's MLPs
        if self.experts is not None:
            sparse = sum(self.experts.layers) / self.num_layers
            width += sparse * (self.experts.per_token * self.experts.ffn_hidden_size - width)
            router = sparse * self.experts.count
        return self.hidden_size * (self._attention_width + 3 * width + router)

    @property
    def _attention_width(self) -> int:
        return self.head_size * (2 * self.num_attention_heads + 2 * self.num_query_groups)

    @property
    def weights_per_token(self) -> float:
        """Weights that multiply each token, including the output layer's."""
        return self.num_layers * self.weights_per_layer + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters, including every expert's."""
        sparse = 0 if self.experts is None else sum(self.experts.layers)
        width, router = (self.num_layers - sparse) * self.ffn_hidden_size, 0
        if self.experts is not None:
            width += sparse * self.experts.count * self.experts.ffn_hidden_size
            router = sparse * self.experts.count
        heads = self.num_attention_heads + 2 * self.num_query_groups
        small = 2 * self.hidden_size  # norms
        small += heads * self.head_size * self.qkv_bias + 2 * self.head_size * self.qk_layernorm
        matrices = self.num_layers * self._attention_width + 3 * width + router
        embeddings = (2 - self.tied_embeddings) * self.vocab_size
        return self.hidden_size * (matrices + embeddings + 1) + self.num_layers * small

    def require_window(self, seq_length: int, *, what: str) -> None:
        """Raise UnsupportedModelError if rows exceed the sliding window."""
        if self.sliding_window is not None and self.sliding_window < seq_length:
            raise UnsupportedModelError(
                f"the {what} attends to {self.sliding_window} tokens (sliding_window), a row has "
                f"{seq_length}: windowed attention isn't supported; use at most "
                f"{self.sliding_window} tokens per row"
            )

    def require_parallel(self, *, tensor: int, expert: int) -> None:
        """Raise ValueError unless these ranks can share layers."""
        shared = [
            ("attention heads", self.num_attention_heads, tensor),
            ("key and value heads", self.num_query_groups, tensor),
            ("MLP columns", self.ffn_hidden_size, tensor),
            ("experts", 0 if self.experts is None else self.experts.count, expert),
        ]
        if self.experts is not None:
            shared.append(("columns of an expert", self.experts.ffn_hidden_size, tensor))
        for name, count, ranks in shared:
            if ranks > 1 and (not count or count % ranks):
                remedy = f"choose a size that divides {count}" if count else "leave the option out"
                raise ValueError(
                    f"the teacher's {count} {name} can't be shared by {ranks} ranks: {remedy}"
                )

    def inverse_frequencies(self) -> Tensor:
        """Return the rotary inverse frequencies, fp32 [head_size / 2].

        Megatron's scaling knows only Llama 3.1's constants.
        """
        if self.config["rope_parameters"]["rope_type"] == "default":
            exponents = torch.arange(0, self.head_size, 2, dtype=torch.int64).float()
            return 1.0 / (self.rotary_base ** (exponents / self.head_size))
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled = ROPE_INIT_FUNCTIONS[self.config["rope_parameters"]["rope_type"]]
        frequencies, _ = scaled(AutoConfig.for_model(**self.config), torch.device("cpu"))
        return frequencies.float()


def read_shape(folder: str | Path) -> ModelShape:
    """Read a shape from a Hugging Face folder or repository.

    UnsupportedModelError for an untranslated architecture or part.
    """
    from pipeline.models.weights import read_config

    return shape_of_config(read_config(folder).to_dict())


def shape_of_config(config: dict[str, Any]) -> ModelShape:
    """Return a complete config's shape; errors as in `read_shape`."""
    family = str(config.get("model_type"))
    _refuse_untranslated(family, config)
    num_heads = config["num_attention_heads"]
    is_windowed = config.get("use_sliding_window", True)  # a switch of Qwen's
    return ModelShape(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=num_heads,
        num_query_groups=config.get("num_key_value_heads") or num_heads,
        head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
        vocab_size=config["vocab_size"],
        layernorm_epsilon=config["rms_norm_eps"],
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2",
        qk_layernorm=family.startswith("qwen3"),
        rotary_base=float(config["rope_parameters"]["rope_theta"]),
        max_position_embeddings=config["max_position_embeddings"],
        sliding_window=config.get("sliding_window") if is_windowed else None,
        config=config,
        experts=_experts(config) if family == "qwen3_moe" else None,
    )


def _experts(config: dict[str, Any]) -> Experts | None:
    # transformers 5 renamed it.
    count = config.get("num_experts") or config.get("num_local_experts")
    every, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
    numbers = range(config["num_hidden_layers"])
    layers = tuple(layer not in dense and (layer + 1) % every == 0 for layer in numbers)
    if not count or not any(layers):
        return None
    return Experts(
        count=count,
        per_token=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        renormalised=config["norm_topk_prob"],
        layers=layers,
    )


def _refuse_untranslated(family: str, config: dict[str, Any]) -> None:
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {family!r} isn't supported, only {', '.join(FAMILIES)}: convert the model "
            "if it is one of these under another name"
        )
    rope = config.get("rope_parameters") or {}
    refused = {
        "hidden_act": config.get("hidden_act") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "quantization_config": config.get("quantization_config") is not None,
        # Yarn and longrope also scale attention; dynamic depends on length.
        "rope_parameters": rope.get("rope_type") not in _ROPE_TYPES,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for name, is_refused in refused.items():
        if is_refused:
            value = config.get(name, rope.get(name))
            raise UnsupportedModelError(
                f"a {family} model with {name} {value!r} isn't supported: the plugin would train "
                "or score a different model from this"
            )
