"""How the vocabulary is walked in chunks, and what is multiplied in each."""

import torch
from torch import Tensor

# Logits held at once. On CPU a chunk of 8 MiB stays in cache (measured: 4,096 tokens by 512 rows is
# 2.5 times faster than by 4,096); on an accelerator larger chunks keep the matrix units busy.
_CPU_CHUNK_ELEMENTS = 2**21
_ACCELERATOR_CHUNK_ELEMENTS = 2**25
_MIN_CHUNK_ROWS = 128
# Below -87.3 an fp32 exponential is subnormal, which CPUs compute eight times slower (measured) and
# which changes no sum: exp(-87) is 1.6e-38.
MIN_EXPONENT = -87.0


def matmul_wide(left: Tensor, right: Tensor) -> Tensor:
    """Multiply with an fp32 result (fp64 for fp64 inputs).

    torch 2.15 has a half-precision product with an fp32 result on CUDA only; elsewhere the operands
    are widened first. A gradient of logits (fp32) is narrowed to meet half-precision weights.
    """
    half = next(
        (t.dtype for t in (left, right) if t.dtype in (torch.bfloat16, torch.float16)), None
    )
    if left.is_cuda and half is not None:
        return torch.mm(left.to(half), right.to(half), out_dtype=torch.float32)
    return widen(left) @ widen(right)


def widen_once(hidden: Tensor) -> Tensor:
    """Widen once what `matmul_wide` would widen again for every chunk."""
    return hidden if hidden.is_cuda else widen(hidden)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def row_chunks(vocab_size: int, chunk_rows: int) -> list[slice]:
    """Return a vocabulary's rows in chunks, the last of which may be shorter."""
    starts = range(0, vocab_size, chunk_rows)
    return [slice(start, min(start + chunk_rows, vocab_size)) for start in starts]


def rows_at_once(num_tokens: int, device: torch.device) -> int:
    """Return how many rows of the vocabulary a chunk of logits of so many tokens has."""
    elements = _CPU_CHUNK_ELEMENTS if device.type == "cpu" else _ACCELERATOR_CHUNK_ELEMENTS
    return max(_MIN_CHUNK_ROWS, elements // max(1, num_tokens))
