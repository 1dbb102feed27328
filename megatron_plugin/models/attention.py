"""Attention within the documents of packed rows, on torch's own kernels.

Half-precision CUDA tensors go through torch's variable-length attention (`pipeline.models.varlen`),
others through one scaled_dot_product_attention per document.

Context-parallel ranks gather whole rows' keys and values: ring attention knows no documents'
bounds.

Dimensions: s places of a row, b rows, n query heads, g key heads, d channels of a head, t = b * s
places of all rows, row after row, o of this rank, q queries and k keys of a piece.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from megatron_plugin.models.copies import to_device
from megatron_plugin.models.places import WHOLE_ROWS, RowShare, gather_places
from megatron_plugin.upstream import (
    AttnMaskType,
    MegatronModule,
    PackedSeqParams,
    ProcessGroupCollection,
    TransformerConfig,
    parallel_state,
)
from pipeline.models import varlen

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionPiece:
    """A document's places [start, stop) among o, and their keys [key_start, key_stop) among t."""

    start: int
    stop: int
    key_start: int
    key_stop: int


@dataclass
class RowSegments(PackedSeqParams):
    """A micro-batch's documents, for the attention of every layer.

    `qkv_format` stays "sbhd", so pipeline stages exchange tensors of one shape. `cu_seqlens_q` and
    `cu_seqlens_kv` are of the pieces and `varlen.num_empty` empty ones. `pieces` cover this rank's
    places in order; `key_places`, int64, are their keys among t; None if these are all, once.
    """

    pieces: tuple[AttentionPiece, ...] = ()
    key_places: Tensor | None = None


def row_segments(
    cu_seqlens: Tensor, seq_length: int, device: torch.device | str, share: RowShare = WHOLE_ROWS
) -> RowSegments:
    """Return a micro-batch's segments, for this rank's share of its rows.

    `cu_seqlens` are int32 [rows, segments + 1] on the CPU.
    """
    starts = torch.arange(len(cu_seqlens)).unsqueeze(1) * seq_length
    bounds: list[int] = torch.unique(cu_seqlens.long() + starts).tolist()
    pieces = tuple(_cut(bounds, seq_length, share))
    cu_seqlens_q = _cumulated([piece.stop - piece.start for piece in pieces], device)
    key_places, cu_seqlens_kv = None, cu_seqlens_q
    if share.size > 1:
        keys = [torch.arange(piece.key_start, piece.key_stop) for piece in pieces]
        key_places = to_device(torch.cat(keys), device)
        cu_seqlens_kv = _cumulated([len(places) for places in keys], device)
    return RowSegments(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        # Places of Megatron's rotary embeddings.
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
        pieces=pieces,
        key_places=key_places,
    )


def _cut(bounds: Sequence[int], seq_length: int, share: RowShare) -> Iterator[AttentionPiece]:
    end = 0  # of previous pieces
    for row in range(bounds[-1] // seq_length):
        for start, stop in share.stretches(seq_length):
            place, last = row * seq_length + start, row * seq_length + stop
            while place < last:
                document = bisect_right(bounds, place)
                next_place = min(bounds[document], last)
                yield AttentionPiece(
                    end, end + next_place - place, bounds[document - 1], next_place
                )
                end += next_place - place
                place = next_place


def _cumulated(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    filled = [*lengths, *[0] * varlen.num_empty(len(lengths))]
    return to_device(torch.tensor([0, *accumulate(filled)], dtype=torch.int32), device)


class PackedAttention(MegatronModule):
    """Causal attention within each document, replacing `DotProductAttention`."""

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
        """RuntimeError if torch's kernel lacks a feature."""
        super().__init__(config=config)
        if (config.bf16 or config.fp16) and (missing := varlen.missing_kernel()):
            raise RuntimeError(missing)
        self.softmax_scale = softmax_scale
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        # Rank 0 holds the first layer.
        self._says_kernel = layer_number == 1 and dist.get_rank() == 0

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
        """Return [o/b, b, n * d] of queries [o/b, b, n, d], keys and values [o/b, b, g, d]."""
        assert attention_mask is None, "the documents' bounds take the mask's place"
        num_places, num_rows = query.shape[:2]
        if self.config.context_parallel_size > 1:
            together = torch.stack((key, value), 1)
            group = parallel_state.get_context_parallel_group()
            key, value = gather_places(together, group).unbind(1)
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        if self._says_kernel:
            self._says_kernel = False
            logger.info("attention runs on %s", kernel_name(q, k, v, packed_seq_params))
        attended_tnd = attend_documents(q, k, v, packed_seq_params, scale=self.softmax_scale)
        rows = attended_tnd.flatten(1).view(num_rows, num_places, -1)
        return rows.transpose(0, 1).contiguous()


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, *, scale: float | None = None
) -> Tensor:
    """Attend causally within each document: queries float [o, n, d], keys and values [t, g, d]."""
    if varlen.fits_kernel(query, value):
        if segments.key_places is not None:
            key, value = (each.index_select(0, segments.key_places) for each in (key, value))
        bounds, longest = (segments.cu_seqlens_q, segments.cu_seqlens_kv), segments.max_seqlen_kv
        return varlen.attend_varlen(query, key, value, *bounds, longest=longest, scale=scale)
    grouped = query.shape[1] != key.shape[1]
    heads_first = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    attended_pieces = []
    for piece in segments.pieces:
        q = heads_first[0][:, :, piece.start : piece.stop]
        k, v = (each[:, :, piece.key_start : piece.key_stop] for each in heads_first[1:])
        mask = _lower_right(q.shape[2], k.shape[2], q.device)
        causal = mask is None
        attended_pieces.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(attended_pieces, 2).squeeze(0).transpose(0, 1)


def kernel_name(query: Tensor, key: Tensor, value: Tensor, segments: RowSegments) -> str:
    """Name the kernel of `attend_documents`, and why none is faster."""
    if not varlen.fits_kernel(query, value):
        return f"one kernel a document, for {query.dtype} on {query.device.type}"
    if segments.key_places is not None:
        return "torch's flash attention (context-parallel ranks share rows)"
    reason = varlen.why_not_cudnn(query, key)
    return "cuDNN's attention" if reason is None else f"torch's flash attention ({reason})"


def _lower_right(num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    """Return the keys seen by the last queries, bool [q, k]; None if all are queries.

    `is_causal` takes queries for the first ones.
    """
    if num_queries == num_keys:
        return None
    every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return every.tril(num_keys - num_queries)
