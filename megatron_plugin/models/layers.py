"""Layers without Transformer Engine: norms under sequence parallelism, grouped experts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from megatron_plugin.upstream import (
    MoESubmodules,
    SequentialMLP,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayerSubmodules,
    WrappedTorchNorm,
)

_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class PartedNorm:
    """torch's norm under sequence parallelism, which Megatron's own torch norm refuses.

    Marks weights, so Megatron sums their gradients over ranks.
    """

    def __new__(  # type: ignore[misc]  # another class's object
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """Return the configured norm, as `WrappedTorchNorm` does."""
        norm: torch.nn.Module = _KINDS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm


def replace_norms(block: TransformerBlockSubmodules) -> None:
    """Replace Megatron's torch norm by `PartedNorm`."""
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


class GroupedExperts(SequentialMLP):
    """A frozen teacher's experts as two grouped products; parameters keep their names."""

    def __init__(self, num_local_experts: int, *given: Any, **named: Any) -> None:
        """Let weights share memory, [experts, outputs, inputs]."""
        super().__init__(num_local_experts, *given, **named)
        self._first, self._second = (
            self._share([getattr(expert, name).weight for expert in self.local_experts])
            for name in ("linear_fc1", "linear_fc2")
        )

    @staticmethod
    def _share(weights: list[torch.nn.Parameter]) -> Tensor:
        together = torch.empty(
            len(weights), *weights[0].shape, dtype=weights[0].dtype, device=weights[0].device
        )
        for number, weight in enumerate(weights):
            weight.data = together[number]
        return together

    def forward(
        self, tokens_nh: Tensor, tokens_per_expert: Tensor, weights_n: Tensor
    ) -> tuple[Tensor, None]:
        """Return each token's product with its expert, times the router's weight [n].

        Tokens, [n, h], are sorted by expert; `tokens_per_expert` is int64 [experts] on any device.
        """
        assert self.local_experts[0].linear_fc1.weight.data_ptr() == self._first.data_ptr(), (
            "the experts' weights were moved or cast after they were made"
        )
        if not len(tokens_nh):
            return tokens_nh, None
        stops = tokens_per_expert.cumsum(0).to(tokens_nh.device, torch.int32, non_blocking=True)
        gate, up = grouped_mm(tokens_nh, self._first.mT, offs=stops).chunk(2, -1)
        scaled = (silu(gate) * up * weights_n.unsqueeze(-1)).to(tokens_nh.dtype)
        return grouped_mm(scaled, self._second.mT, offs=stops), None


def group_experts(block: TransformerBlockSubmodules) -> None:
    """Replace Megatron's list of experts by `GroupedExperts`."""
    for spec in block.layer_specs or ():
        parts = getattr(spec.submodules.mlp, "keywords", {}).get("submodules")
        if isinstance(parts, MoESubmodules):
            parts.experts = partial(GroupedExperts, **parts.experts.keywords)
