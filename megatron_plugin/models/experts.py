"""A mixture's experts in two grouped products, in place of one small MLP after the other.

torch's own grouped product; Transformer Engine's, which Megatron would take, isn't needed. For a
frozen teacher alone: the backward pass is torch's, and nothing is saved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from megatron_plugin.upstream import MoESubmodules, SequentialMLP, TransformerBlockSubmodules


class GroupedExperts(SequentialMLP):
    """Megatron's list of experts, whose weights are parts of two tensors.

    The list stays what weights are loaded into and what parameters are named by.
    """

    def __init__(self, num_local_experts: int, *given: Any, **named: Any) -> None:
        """Build the list; let its weights share memory, [experts, outputs, inputs]."""
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
        """Return each token's product with its expert, times the expert's weight for it.

        Args:
            tokens_nh: hidden states, sorted by expert.
            tokens_per_expert: int64 [experts], on any device.
            weights_n: of the router.
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
    """Put `GroupedExperts` where a block's specification names Megatron's list of experts."""
    for spec in block.layer_specs or ():
        parts = getattr(spec.submodules.mlp, "keywords", {}).get("submodules")
        if isinstance(parts, MoESubmodules):
            parts.experts = partial(GroupedExperts, **parts.experts.keywords)
