"""torch's attention over documents of varying lengths.

cuDNN's, from torch 2.15, builds a graph, in tens of milliseconds, for each number of documents and
longest length. So the longest is given as a row's length, and bounds are padded with empty
documents. cuDNN before 9.25 gives NaN for those; then flash attention runs.

Dimensions: t places of queries or keys; h heads, k of keys; d channels of a head.
"""

import inspect
import logging
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from torch.nn.attention import varlen
except ImportError:  # before 2.10
    varlen = None  # type: ignore[assignment]
varlen_attn: Any = getattr(varlen, "varlen_attn", None)

logger = logging.getLogger(__name__)

_KNOWN = frozenset(inspect.signature(varlen_attn).parameters if varlen_attn else ())
_NEEDED = {"scale", "window_size"}
# Before 2.12 there was only flash attention, which takes grouped heads without this option.
_ASKED_FOR_GROUPS = "enable_gqa" in _KNOWN
_CAUSAL, _FLASH = (-1, 0), SDPBackend.FLASH_ATTENTION


def num_empty(num_documents: int) -> int:
    """Empty documents that pad bounds to a multiple of 32."""
    return -num_documents % 32


@cache
@torch.compiler.assume_constant_result
def missing_kernel() -> str | None:
    """Return what this torch's kernel lacks, if anything, and log it."""
    if not (lacking := _NEEDED - _KNOWN):
        return None
    names = ", ".join(sorted(lacking))
    message = f"torch {torch.__version__} has no varlen_attn with {names}: install torch>=2.11"
    logger.warning("%s; until then documents are attended to in turn, which is slower", message)
    return message


def fits_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether `attend_varlen` takes queries [t, h, d] with values [t, k, d]."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and missing_kernel() is None
    )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    *,
    longest: int,
    scale: float | None = None,
    window: tuple[int, int] = _CAUSAL,
) -> Tensor:
    """Attend within each document; its last query sees all its keys, the one before one fewer.

    Queries and result are 16-bit [t, h, d] on a GPU, keys and values [t, k, d], bounds int32
    [documents + 1]. cuDNN runs only if both bounds are one tensor. A `scale` of None is 1 /
    sqrt(d); `window` are the places seen before and after a query, -1 for all.
    """
    options: dict[str, Any] = {"scale": scale, "window_size": window}
    if _ASKED_FOR_GROUPS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    with nullcontext() if why_not_cudnn(query, key) is None else sdpa_kernel(_FLASH):
        places = longest, longest
        attended: Tensor = varlen_attn(query, key, value, bounds, key_bounds, *places, **options)
    return attended


def why_not_cudnn(query: Tensor, key: Tensor) -> str | None:
    """Return why cuDNN can't attend with empty documents, or None."""
    shapes = query.shape[1:], key.shape[1:]
    reason: str | None = _why_not_cudnn(query.device, query.dtype, *shapes)
    return reason


@cache
@torch.compiler.assume_constant_result
def _why_not_cudnn(
    device: torch.device, dtype: torch.dtype, query: torch.Size, key: torch.Size
) -> str | None:
    if torch.__version__ < "2.15":  # compares versions
        return "torch before 2.15 has it for no causal attention"
    places, options = 256, {"window_size": _CAUSAL, "enable_gqa": query != key}

    def results(backend: SDPBackend, *stops: int) -> Tensor:
        bounds = torch.tensor([0, *stops], dtype=torch.int32, device=device)
        # Not random: a run's random numbers must not change.
        inputs = [
            torch.arange(places * each.numel(), device=device).sin().to(dtype)
            .view(places, *each).requires_grad_()
            for each in (query, key, key)
        ]  # fmt: skip
        with sdpa_kernel(backend):
            out = varlen_attn(*inputs, bounds, bounds, places, places, **options)
            found = (out, *torch.autograd.grad(out.square().sum(), inputs))
        return torch.cat([each.detach().flatten() for each in found]).float()

    with torch.inference_mode(False), torch.enable_grad():
        try:
            found = results(SDPBackend.CUDNN_ATTENTION, 99, 99, *[places] * 30)
        except RuntimeError as error:
            return " ".join(str(error).split())
        if torch.allclose(found, results(_FLASH, 99, places), rtol=0.05, atol=0.05):
            return None
    return f"cuDNN {torch.backends.cudnn.version()} gives other results if documents are empty"
