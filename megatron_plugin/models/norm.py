"""Norms for layers without Transformer Engine, also under sequence parallelism.

Megatron's own torch norm refuses sequence parallelism for one reason: each tensor-parallel rank
normalises its own part of the places, so the weight's gradient has to be summed over the ranks.
Megatron's gradient reduction does that for every parameter that says so; its norm doesn't say so.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_plugin.upstream import (
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayerSubmodules,
    WrappedTorchNorm,
)

_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class PartedNorm:
    """torch's own norm, whose ranks may each hold a part of the places.

    A class that builds another's object, as Megatron's `WrappedTorchNorm` is.
    """

    def __new__(  # type: ignore[misc]  # as said above
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """Return the norm of `hidden_size` channels that the configuration names."""
        norm: torch.nn.Module = _KINDS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm


def replace_norms(block: TransformerBlockSubmodules) -> None:
    """Put `PartedNorm` where a block's specification names Megatron's torch norm."""
    block.layer_norm = _replaced(block.layer_norm)
    for spec in block.layer_specs or ():
        layer: TransformerLayerSubmodules = spec.submodules
        layer.input_layernorm = _replaced(layer.input_layernorm)
        layer.pre_mlp_layernorm = _replaced(layer.pre_mlp_layernorm)
        attention = layer.self_attention.submodules
        attention.q_layernorm = _replaced(attention.q_layernorm)
        attention.k_layernorm = _replaced(attention.k_layernorm)


def _replaced(norm: Any) -> Any:
    return PartedNorm if norm is WrappedTorchNorm else norm
