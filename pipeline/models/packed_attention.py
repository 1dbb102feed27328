"""Attention of packed rows: each document attends to itself, without a mask.

transformers (5) separates documents with a T x T mask, so a row costs as much as one long document.
Here torch's kernel for varying lengths runs on GPUs in 16 bits; elsewhere each document runs alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.models import varlen

# Shapes: b rows of l places, s = b * l; h heads (k of keys), d of each.

PACKED_ATTENTION = "vocag_packed"
"""The implementation's name in transformers."""

# Features of some models that this implementation lacks: caps, sinks, biases, chosen keys.
_UNKNOWN = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


def find_bounds(position_ids: Tensor) -> Tensor:
    """Return the starts of all rows' documents, laid end to end, int32 [segments + 1].

    `position_ids`, int [rows, T], are from 0 in every segment.

    Example:
        >>> find_bounds(torch.tensor([[0, 1, 0], [0, 1, 2]])).tolist()
        [0, 2, 3, 6]
    """
    starts = position_ids == 0
    starts[:, 0] = True  # nothing continues from row to row
    places = starts.flatten().nonzero().flatten()
    return F.pad(places, (0, 1), value=position_ids.numel()).int()


def packed_arguments(
    model: PreTrainedModel, position_ids: Tensor, on_host: Tensor | None = None
) -> dict[str, Any]:
    """Return the forward pass's arguments, besides positions, for the attention implementation.

    Args:
        model: whose configuration names the implementation.
        position_ids: int [rows, T], from 0 in every segment.
        on_host: the same in host memory; None: the host waits for the device's.

    Example:
        >>> more = packed_arguments(model, position_ids)
        >>> model.base_model(input_ids, position_ids=position_ids, use_cache=False, **more)
    """
    kind = str(model.config._attn_implementation)
    if kind != PACKED_ATTENTION and "flash" not in kind:
        return {"attention_mask": None}
    bounds = find_bounds(position_ids if on_host is None else on_host)
    longest = position_ids.shape[1]
    if kind == PACKED_ATTENTION:
        bounds = F.pad(bounds, (0, varlen.num_empty(len(bounds) - 1)), value=position_ids.numel())
    if position_ids.is_cuda and on_host is not None:
        bounds = bounds.pin_memory().to(position_ids.device, non_blocking=True)
    return {
        # transformers passes a mask of four dimensions on, so an empty one saves making one.
        "attention_mask": bounds.new_empty(0, 0, 0, 0) if kind == PACKED_ATTENTION else None,
        # By position alone, flash attention separates the documents of a single row only.
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def register() -> None:
    """Register `packed_attention` with transformers; repeating it is harmless."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within documents bounded by `packed_arguments`; transformers calls it.

    Queries are float [rows, heads, T, d], keys and values [rows, key heads, T, d], the result
    [rows, T, heads, d]. A token sees itself and `sliding_window - 1` before it. Without bounds it
    is "sdpa".
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if unknown or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} attends with {unknown or 'no causal order'}")
    shape_blhd = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    q_shd, k_shd, v_shd = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    if torch.is_autocast_enabled(query.device.type):
        # As torch's own attention does: rotation in fp32 has widened queries and keys.
        dtype = torch.get_autocast_dtype(query.device.type)
        q_shd, k_shd, v_shd = (each.to(dtype) for each in (q_shd, k_shd, v_shd))
    if not varlen.fits_kernel(q_shd, v_shd):
        out_shd = _attend_in_turn(
            (q_shd, k_shd, v_shd),
            cu_seq_lens_q,
            scale=scaling,
            dropout=dropout,
            window=sliding_window,
        )
    elif dropout:
        raise ValueError(f"attention dropout {dropout} is not in torch's kernel: set it to 0")
    else:
        out_shd = varlen.attend_varlen(
            q_shd,
            k_shd,
            v_shd,
            cu_seq_lens_q,
            cu_seq_lens_q,
            longest=query.shape[2],
            scale=scaling,
            window=(-1 if sliding_window is None else sliding_window - 1, 0),
        )
    return out_shd.view(shape_blhd), None


@torch.compiler.disable  # the loop's length is data
def _attend_in_turn(
    states_shd: Sequence[Tensor],
    bounds: Tensor,
    *,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    lengths = [length for length in bounds.diff().tolist() if length]
    # Splitting, unlike slicing, lets the gradient be assembled once.
    parts = zip(*(torch.split(states, lengths) for states in states_shd), strict=True)
    shared = states_shd[0].shape[1] // states_shd[1].shape[1]
    outs = []
    for query, key, value in parts:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        if shared > 1:
            k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        band = None if window is None or len(query) <= window else _band(len(query), window, q)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, dropout_p=dropout, scale=scale
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _band(length: int, window: int, like: Tensor) -> Tensor:
    square = torch.ones(length, length, dtype=torch.bool, device=like.device)
    return square.tril().triu(1 - window)
