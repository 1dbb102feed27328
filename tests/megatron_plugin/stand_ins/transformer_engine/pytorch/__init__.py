"""Modules."""

from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.modules import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
]
