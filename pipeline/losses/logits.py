"""Output layers: from hidden states to logits, in chunks of rows, shared by ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits held at once. On CPU a chunk of 8 MiB stays in cache (measured: 4,096 tokens by 512 rows is
# 2.5 times faster than by 4,096); on an accelerator larger chunks keep the matrix units busy.
_CPU_CHUNK_ELEMENTS = 2**21
_ACCELERATOR_CHUNK_ELEMENTS = 2**25
_MIN_CHUNK_ROWS = 128
# Below -87.3 an fp32 exponential is subnormal, which CPUs compute eight times slower (measured) and
# which changes no sum: exp(-87) is 1.6e-38.
MIN_EXPONENT = -87.0


@dataclass(frozen=True)
class OutputLayer:
    """An output layer without a bias; models may scale and cap its products.

    A logit is `product * scale`, and with a cap `cap * tanh(product * scale / cap)`.

    Attributes:
        weight: float [V, H].
        scale: used by Granite, Cohere, Falcon-H1.
        cap: used by Gemma, RecurrentGemma, xLSTM; None: no bound.
    """

    weight: Tensor
    scale: float = 1.0
    cap: float | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the weight."""
        return len(self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return whole logits, at least fp32 [..., V], differentiable; for few tokens at once.

        Example:
            >>> OutputLayer(torch.eye(2), scale=0.5).logits(torch.ones(1, 2))
            tensor([[0.5000, 0.5000]])
        """
        products = _WideProducts.apply(
            hidden.reshape(-1, hidden.shape[-1]), self.weight, autocast_dtype(hidden)
        )
        return to_logits(products.view(*hidden.shape[:-1], len(self.weight)), self.scale, self.cap)


def to_logits(products: Tensor, scale: float, cap: float | None) -> Tensor:
    """Scale and cap products; see `OutputLayer`."""
    scaled = products if scale == 1.0 else products * scale
    return scaled if cap is None else torch.tanh(scaled / cap) * cap


def logit_slopes(logits: Tensor, scale: float, cap: float | None) -> Tensor | float:
    """Return the derivative of `to_logits` at these logits."""
    return scale if cap is None else (1.0 - (logits / cap).square()) * scale


def matmul_wide(left: Tensor, right: Tensor) -> Tensor:
    """Multiply with an fp32 result (fp64 for fp64 inputs).

    torch (2.15) multiplies half-precision operands so only on CUDA, where a gradient of logits
    (fp32) is narrowed to meet its weights.
    """
    half = next(
        (t.dtype for t in (left, right) if t.dtype in (torch.bfloat16, torch.float16)), None
    )
    if left.is_cuda and half is not None:
        return torch.mm(left.to(half), right.to(half), out_dtype=torch.float32)
    return widen(left) @ widen(right)


class _WideProducts(torch.autograd.Function):
    """hidden_nh, weight_vh -> products_nv, at least fp32, of operands in an autocast's dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, half: torch.dtype | None) -> Tensor:
        ctx.half = half
        ctx.save_for_backward(narrow(hidden, half), weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return matmul_wide(narrow(hidden, half), narrow(weight, half).T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden = matmul_wide(grad, narrow(weight, ctx.half))
            return grad_hidden, matmul_wide(grad.T, hidden).to(weight.dtype), None


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype to which an autocast rounds a product's operands; None without one.

    A student's weights and last states stay fp32: unless both are rounded, its largest product
    would run without tensor cores.
    """
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def narrow(tensor: Tensor, half: torch.dtype | None) -> Tensor:
    """Round a tensor as an autocast of this dtype would."""
    return tensor if half is None else tensor.to(half)


def narrow_once(gradient: Tensor, rows: Tensor) -> Tensor:
    """Narrow once, not in every `matmul_wide`."""
    is_half = gradient.is_cuda and rows.dtype in (torch.bfloat16, torch.float16)
    return gradient.to(rows.dtype) if is_half else gradient


def widen_once(hidden: Tensor) -> Tensor:
    """Widen once, not in every `matmul_wide`."""
    return hidden if hidden.is_cuda else widen(hidden)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def row_chunks(vocab_size: int, chunk_rows: int) -> list[slice]:
    """Cut a vocabulary's rows into chunks; the last may be shorter."""
    starts = range(0, vocab_size, chunk_rows)
    return [slice(start, min(start + chunk_rows, vocab_size)) for start in starts]


def rows_at_once(num_tokens: int, device: torch.device) -> int:
    """Return the rows of the vocabulary per chunk of logits."""
    elements = _CPU_CHUNK_ELEMENTS if device.type == "cpu" else _ACCELERATOR_CHUNK_ELEMENTS
    return max(_MIN_CHUNK_ROWS, elements // max(1, num_tokens))


@dataclass(frozen=True)
class VocabularyShare:
    """This rank's part of a group's vocabulary, `num_own` tokens from `first` on.

    It may be only padding. Without a group it is the whole vocabulary.
    """

    vocab_size: int
    first: int
    num_own: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, num_rows: int, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> "VocabularyShare":
        """Return this rank's share if each rank has `num_rows` rows, in order.

        `vocab_size` of all rows are tokens, None: all; ValueError if there are fewer rows.
        """
        ranks = 1 if group is None else group.size()
        vocab_size = num_rows * ranks if vocab_size is None else vocab_size
        if not 1 <= vocab_size <= num_rows * ranks:
            raise ValueError(
                f"vocab_size {vocab_size} must lie in 1..{num_rows * ranks}, the rows of the "
                "output layer's weight"
            )
        if group is None or ranks == 1:
            return cls(vocab_size, 0, vocab_size)
        first = group.rank() * num_rows
        return cls(vocab_size, first, min(max(vocab_size - first, 0), num_rows), group)

    def own_ids(self, token_ids: Tensor) -> Tensor:
        """Return tokens' rows in this rank's layer; -1 for other ranks'."""
        if self.group is None:
            return token_ids
        own = token_ids - self.first
        return own.where((own >= 0) & (own < self.num_own), -1)

    def sum(self, own: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(own, group=self.group)
        return own

    def maximum(self, own: Tensor) -> Tensor:
        """Return the largest over the ranks."""
        if self.group is None:
            return own
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def logsumexp(self, own: Tensor) -> Tensor:
        """Return the log-sum-exp over the ranks."""
        if self.group is None:
            return own
        largest = self.maximum(own).clamp_min(torch.finfo(own.dtype).min)
        return self.sum(torch.exp(own - largest)).log_().add_(largest)

    def gather(self, own: Tensor) -> Tensor:
        """Gather the ranks' columns [n, K], in order, as [n, ranks * K]."""
        if self.group is None:
            return own
        ranks = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(ranks, own.contiguous(), group=self.group)
        return torch.cat(ranks, -1)
