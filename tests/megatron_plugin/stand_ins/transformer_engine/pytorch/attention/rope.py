"""Rotary embeddings."""

import torch


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    """Rotate float [s, b, n, d] by angles [s, 1, 1, d]."""
    assert (tensor_format, interleaved, fused) == ("sbhd", False, True)
    first, second = t.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    return t * freqs.cos().to(t.dtype) + rotated * freqs.sin().to(t.dtype)
