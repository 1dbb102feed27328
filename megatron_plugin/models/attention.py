"""Attention over packed rows without Transformer Engine, on torch's own kernels.

Each document of a row attends to itself alone. No [seq, seq] mask exists: half-precision CUDA
tensors go through torch's variable-length flash attention, everything else through one
scaled_dot_product_attention per document.

Context-parallel ranks each hold a part of every row's places. They gather the keys and values of
whole rows, and each computes its own queries. Ring attention, torch's own included, knows one
causal sequence and no documents' bounds. With grouped heads, whole rows' keys and values are small.

Dimensions: s places of a row, b rows, n query heads, g key heads, d channels of a head,
t = b * s places of all rows, one row after the other; o of them are this rank's, q queries and
k keys of a piece.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Neighbouring places of one document that this rank holds, and what they attend to.

    Attributes:
        start: first place, among o.
        stop: behind the last one.
        key_start: first place of the document, among t.
        key_stop: behind the piece's last place, among t.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int


@dataclass
class RowSegments(PackedSeqParams):
    """Where the documents of a micro-batch lie, as the attention of every layer takes it.

    `qkv_format` stays "sbhd": rows keep their dimension, so pipeline stages exchange tensors of one
    shape, whatever the documents' lengths. `cu_seqlens_q` and `cu_seqlens_kv` are those of the
    pieces, one behind the other.

    Attributes:
        longest: keys of the piece that has most.
        pieces: of the documents, all of this rank's places in order.
        key_places: int64, the pieces' keys among t, one piece behind the other; None if that is
            every place once.
    """

    longest: int = 0
    pieces: tuple[Piece, ...] = ()
    key_places: Tensor | None = None


def row_segments(
    cu_seqlens: Tensor,
    seq_length: int,
    device: torch.device | str,
    share: RowShare = WHOLE_ROWS,
) -> RowSegments:
    """Return the segments of a micro-batch.

    Args:
        cu_seqlens: int32 [rows, segments + 1] on the CPU, as `pipeline.streaming` gives them.
        seq_length: places of a row.
        device: of the copy that kernels read.
        share: this rank's part of the rows.

    Example:
        >>> row_segments(torch.tensor([[0, 3, 4, 4]]), 4, "cpu").cu_seqlens_q
        tensor([0, 3, 4], dtype=torch.int32)
    """
    starts = torch.arange(len(cu_seqlens)).unsqueeze(1) * seq_length
    bounds: list[int] = torch.unique(cu_seqlens.long() + starts).tolist()
    pieces = tuple(_cut(bounds, seq_length, share))
    cu_seqlens_q = _cumulated([piece.stop - piece.start for piece in pieces], device)
    # One tensor for both says to torch that they are equal; on Hopper it asks for that.
    key_places, cu_seqlens_kv = None, cu_seqlens_q
    if share.size > 1:
        keys = [torch.arange(piece.key_start, piece.key_stop) for piece in pieces]
        key_places = to_device(torch.cat(keys), device)
        cu_seqlens_kv = _cumulated([len(places) for places in keys], device)
    return RowSegments(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        # Megatron makes rotary embeddings for so many places.
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
        longest=max(piece.key_stop - piece.key_start for piece in pieces),
        pieces=pieces,
        key_places=key_places,
    )


def _cut(bounds: Sequence[int], seq_length: int, share: RowShare) -> Iterator[Piece]:
    """Yield the pieces of the documents that lie between bounds."""
    end = 0  # of the pieces so far
    for row in range(bounds[-1] // seq_length):
        for start, stop in share.stretches(seq_length):
            place, last = row * seq_length + start, row * seq_length + stop
            while place < last:
                document = bisect_right(bounds, place)
                next_place = min(bounds[document], last)
                yield Piece(end, end + next_place - place, bounds[document - 1], next_place)
                end += next_place - place
                place = next_place


def _cumulated(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


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
        """Take what Megatron's layer specs pass."""
        super().__init__(config=config)
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
    """Attend causally within each document.

    Args:
        query: float [o, n, d].
        key: float [t, g, d].
        value: float [t, g, d].
        segments: the documents.
        scale: of the scores; None: 1 / sqrt(d).

    Returns:
        float [o, n, d].
    """
    if _has_kernel(query):
        return _attend_pieces(query, key, value, segments, scale)
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
    """Return what `attend_documents` runs on for these, and why on nothing faster.

    torch takes cuDNN if it can, and says why not if nothing else is allowed.
    """
    if not _has_kernel(query):
        return f"one kernel a document, for {query.dtype} on {query.device.type}"
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            _attend_pieces(query, key, value, segments, None)
    except RuntimeError as error:
        return f"torch's flash attention ({' '.join(str(error).split())})"
    return "cuDNN's attention"


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype != torch.float32


def _attend_pieces(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, scale: float | None
) -> Tensor:
    """Attend by one kernel for all pieces."""
    if segments.key_places is not None:
        key, value = (each.index_select(0, segments.key_places) for each in (key, value))
    attended = varlen_attn(
        query,
        key,
        value,
        segments.cu_seqlens_q,
        segments.cu_seqlens_kv,
        segments.longest,
        segments.longest,
        scale=scale,
        # The last query sees every key of its piece, the one before one fewer.
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor), "a tuple only if more is asked for"
    return attended


def _lower_right(num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    """Return which keys the last queries of a document see, bool [q, k]; None: as many as queries.

    `is_causal` takes queries for the first ones. Only where rows are shared and no flash attention
    is there does such a mask exist, of one document and one rank.
    """
    if num_queries == num_keys:
        return None
    every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return every.tril(num_keys - num_queries)
