"""Attention over packed rows without Transformer Engine, on torch's own kernels.

Each document of a row attends to itself alone. No [seq, seq] mask exists: half-precision CUDA
tensors go through torch's variable-length flash attention, everything else through one
scaled_dot_product_attention per document.

Dimensions: s places of a row, b rows, n query heads, g key heads, d channels of a head,
t = b * s places of all rows, one row after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]  # attend_documents asks whether it is there


@dataclass
class RowSegments(PackedSeqParams):
    """Where the documents of a micro-batch lie, as the attention of every layer takes it.

    `qkv_format` stays "sbhd": rows keep their dimension, so pipeline stages exchange tensors of one
    shape, whatever the documents' lengths.

    Attributes:
        bounds: first places of all documents among t, and t at the end; strictly increasing.
        longest: places of the longest document.
    """

    bounds: tuple[int, ...] = ()
    longest: int = 0


def row_segments(cu_seqlens: Tensor, seq_length: int, device: torch.device | str) -> RowSegments:
    """Return the segments of a micro-batch.

    Args:
        cu_seqlens: int32 [rows, segments + 1] on the CPU, each row's segment bounds, as
            `pipeline.streaming` gives them: filled up with `seq_length`.
        seq_length: places of a row.
        device: of the copy that kernels read.

    Example:
        >>> row_segments(torch.tensor([[0, 3, 4, 4]]), 4, "cpu").bounds
        (0, 3, 4)
    """
    starts = torch.arange(len(cu_seqlens)).unsqueeze(1) * seq_length
    bounds = torch.unique(cu_seqlens.long() + starts)
    flat = bounds.to(device=device, dtype=torch.int32)
    return RowSegments(
        qkv_format="sbhd",
        cu_seqlens_q=flat,
        cu_seqlens_kv=flat,
        # Megatron makes rotary embeddings for so many places.
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
        bounds=tuple(bounds.tolist()),
        longest=int(bounds.diff().max()),
    )


class PackedAttention(MegatronModule):
    """Causal attention within each document; takes the place of `DotProductAttention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Take what Megatron's layer specs pass; most of it has one permitted value."""
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        assert config.context_parallel_size == 1, "arguments.py refuses context parallelism"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowSegments,
        **_: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: float [s, b, n, d].
            key: float [s, b, g, d].
            value: float [s, b, g, d].
            attention_mask: must be None.
            packed_seq_params: the documents.

        Returns:
            float [s, b, n * d].
        """
        assert attention_mask is None, "the documents' bounds take the mask's place"
        num_places, num_rows = query.shape[:2]
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        attended_tnd = attend_documents(q, k, v, packed_seq_params, scale=self.softmax_scale)
        rows = attended_tnd.flatten(1).view(num_rows, num_places, -1)
        return rows.transpose(0, 1).contiguous()


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, *, scale: float | None = None
) -> Tensor:
    """Attend causally within each document.

    Args:
        query: float [t, n, d].
        key: float [t, g, d].
        value: float [t, g, d].
        segments: the documents.
        scale: of the scores; None: 1 / sqrt(d).

    Returns:
        float [t, n, d].
    """
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype != torch.float32 and varlen_attn is not None:
        attended = varlen_attn(
            query,
            key,
            value,
            segments.cu_seqlens_q,
            segments.cu_seqlens_kv,
            segments.longest,
            segments.longest,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=grouped,
        )
        assert isinstance(attended, Tensor), "a tuple only where more is asked for"
        return attended
    heads_first = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    documents = []
    for start, stop in pairwise(segments.bounds):
        q, k, v = (tensor[:, :, start:stop] for tensor in heads_first)
        documents.append(
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        )
    return torch.cat(documents, 2).squeeze(0).transpose(0, 1)
