"""Per-token cross entropy of a language model's output layer without its full logits.

A vocabulary of 151,936 makes the fp32 logits of 4,096 tokens 2.3 GiB, and a plain cross entropy
holds them two to four times. Here the vocabulary is walked in chunks that stay in cache, and the
backward pass recomputes logits, only of tokens whose loss received a gradient. Walking the
vocabulary, not the tokens, makes every row of the weight's gradient one matrix product.

`torch.nn.functional.linear_cross_entropy` (2.15) returns bf16 losses for bf16 inputs, too coarse to
rank, and is slower on CPU (benchmarks/guidance.py). `liger-kernel` and `cut-cross-entropy` need a
GPU.

Shapes: n tokens, v rows of the vocabulary and k entries per token: logits_nv, entry_ids_nk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from pipeline.losses.cell_sums import Cells, CellSums, PlacedCells
from pipeline.losses.chosen_entries import check_entries, chosen_entries, refuse_ids
from pipeline.losses.logits import (
    MIN_EXPONENT,
    OutputLayer,
    VocabularyShare,
    autocast_dtype,
    logit_slopes,
    matmul_wide,
    narrow,
    narrow_once,
    row_chunks,
    rows_at_once,
    to_logits,
    widen,
    widen_once,
)
from pipeline.losses.loss_checks import refuse_any

# Scale and cap of `OutputLayer`.
_Change = tuple[float, float | None]
_UNCHANGED: _Change = (1.0, None)


@dataclass(frozen=True)
class TokenScores:
    """A model's scores of each label.

    Attributes:
        losses: fp32 (fp64 for fp64 inputs) [...], nats, differentiable; 0 if the loss mask is 0.
        entropies: like losses, without a gradient; None unless requested.
        entry_log_probs: like losses, [..., K], of entries or their cells; -inf for no entry. None
            without `entry_ids`.
    """

    losses: Tensor
    entropies: Tensor | None
    entry_log_probs: Tensor | None = None


def linear_cross_entropy(
    hidden: Tensor,
    output_layer: OutputLayer | Tensor,
    labels: Tensor,
    *,
    loss_mask: Tensor | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    entry_ids: Tensor | None = None,
    cells: Cells | None = None,
    group: dist.ProcessGroup | None = None,
    check_labels: bool = True,
    all_learn: bool = False,
) -> TokenScores:
    """Give each label's loss, `-log softmax(logits)[label]`, chunk by chunk.

    Logits of half-precision inputs are fp32. Under autocast only the operands of products are
    rounded to its dtype. A bias is not covered.

    Args:
        hidden: float [..., H], the states that enter the output layer.
        output_layer: or its weight, float [V, H], without scale and cap.
        labels: int64 [...], already shifted; any value where the loss mask is 0.
        loss_mask: bool or float [...], 0 if a label doesn't count. None: all count.
        vocab_size: rows of the weight that are tokens; later rows are padding with probability and
            gradient 0. None: all rows.
        with_entropy: also give the entropy of each predicted distribution.
        entry_ids: int64 [..., K], further tokens to give log-probabilities of; -1: none.
        cells: give the probability of each entry's cell instead.
        group: ranks with equal parts of the weight's rows, in order (tensor parallelism); all call,
            with the same states and labels, and get the same scores.
        check_labels: False: the host doesn't wait for the device; counted labels outside the
            vocabulary get NaN, entries outside count as none.
        all_learn: nearly every label gets a gradient: the backward pass doesn't wait to find which.

    Returns:
        Losses with a gradient to `hidden` and the weight, and requested entropies and
        log-probabilities. With a group, add up the ranks' gradients of `hidden`.

    Raises:
        ValueError: shapes disagree, or a counted label or entry lies outside the vocabulary.

    Example:
        >>> linear_cross_entropy(hidden, lm_head.weight, labels, loss_mask=loss_mask).losses.mean()
    """
    mask = torch.ones_like(labels, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    layer = output_layer if isinstance(output_layer, OutputLayer) else OutputLayer(output_layer)
    share = VocabularyShare.of(layer.vocab_size, vocab_size, group)
    _check_shapes(hidden, layer.weight, labels, mask)
    outside = mask & ((labels < 0) | (labels >= share.vocab_size))
    if check_labels:
        remedy = "set loss_mask to 0 for labels that don't count, or check the tokenizer"
        told = partial(refuse_ids, "labels", labels, outside, share.vocab_size, remedy)
        refuse_any(outside, told)
    flat_labels = labels.masked_fill(~mask | outside, 0).reshape(-1)
    flat_entries = None
    if entry_ids is not None:
        if check_labels:
            check_entries(entry_ids, mask, share.vocab_size)
        flat_entries = entry_ids.masked_fill(~mask.unsqueeze(-1), -1)
        flat_entries = flat_entries.reshape(flat_labels.numel(), entry_ids.shape[-1])
    chunk_rows = rows_at_once(flat_labels.numel(), hidden.device)
    losses, entropies, entry_log_probs = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        layer.weight,
        flat_labels,
        flat_entries,
        (layer.scale, layer.cap),
        (share, chunk_rows, with_entropy, autocast_dtype(hidden), all_learn),
        None if cells is None else cells.on(hidden.device, share),
    )
    losses = losses.view(labels.shape).masked_fill(~mask, 0.0)
    if not check_labels:
        losses = losses.masked_fill(outside, torch.nan)
    entropies = entropies.view(labels.shape).masked_fill(~mask, 0.0) if with_entropy else None
    if flat_entries is not None:
        known = entry_log_probs.masked_fill(flat_entries < 0, -torch.inf)
        entry_log_probs = known.view_as(entry_ids)
    return TokenScores(losses, entropies, entry_log_probs)


@torch.no_grad()
def score_tokens(
    hidden: Tensor,
    output_layer: OutputLayer | Tensor,
    input_ids: Tensor,
    *,
    teacher_loss_mask: Tensor,
) -> Tensor:
    """Give a frozen teacher's losses of its own tokens, fp32 [rows, T], nats; no gradient.

    Entry l is `-log P(x_l | x_<l)`, predicted by the state at l - 1; NaN where the mask is False,
    for padding and tokens without context. ValueError if it is True for a row's first token.
    """
    mask = teacher_loss_mask.bool()
    refuse_any(mask[:, 0], partial(_refuse_first, mask))
    scores = linear_cross_entropy(
        hidden[:, :-1], output_layer, input_ids[:, 1:], loss_mask=mask[:, 1:]
    )
    losses = torch.full(input_ids.shape, torch.nan, dtype=scores.losses.dtype, device=hidden.device)
    losses[:, 1:] = scores.losses.masked_fill(~mask[:, 1:], torch.nan)
    return losses


def wide_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply few states with an output layer, at least fp32 [n, V], without gradient."""
    chunks = row_chunks(len(weight), rows_at_once(len(hidden), hidden.device))
    return torch.cat([matmul_wide(hidden, weight[chunk].T) for chunk in chunks], dim=-1)


def map_token_chunks(
    function: Callable[..., Tensor], *tensors: Tensor, chunk_tokens: int = 256
) -> Tensor:
    """Apply a per-token function chunk by chunk, recomputing each chunk in the backward pass.

    For losses of whole distributions: only one chunk's logits are alive. The tensors share dim 0,
    as does the result; gradients reach parameters that the function closes over.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    chunks = zip(*(torch.split(tensor, chunk_tokens) for tensor in tensors), strict=True)
    return torch.cat([checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks])


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden_nh, weight_vh, labels_n, entry_ids_nk -> losses_n, entropies_n, entry_log_probs_nk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        entry_ids: Tensor | None,
        change: _Change,
        options: tuple[VocabularyShare, int, bool, torch.dtype | None, bool],
        cells: PlacedCells | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        share, chunk_rows, with_entropy, half, _ = options
        ctx.dtype, hidden = hidden.dtype, narrow(hidden, half)
        labels = share.own_ids(labels)
        cell_places = None
        if entry_ids is not None:
            if cells is not None:
                entry_ids, cell_places = cells.split(entry_ids)
            entry_ids = share.own_ids(entry_ids)
        with torch.autocast(hidden.device.type, enabled=False):
            own = narrow(weight[labels.clamp_min(0)], half)
            products = (widen(hidden) * widen(own)).sum(-1)
            label_products = share.sum(products.where(labels >= 0, 0.0))
            label_logits = to_logits(label_products, *change)
            entry_log_probs = None
            log_normaliser, entropies, sums = _log_normalisers(
                hidden,
                weight,
                label_logits,
                entry_ids,
                change=change,
                share=share,
                chunks=row_chunks(share.num_own, chunk_rows),
                with_entropy=with_entropy,
                half=half,
            )
            if sums is not None:
                if cells is not None and cell_places is not None:
                    states = widen_once(hidden)
                    walk = CellSums(cells, states, weight, change, chunk_rows, half)
                    sums = walk.read_into(sums, cell_places)
                sums = share.logsumexp(sums)
                entry_log_probs = (sums - log_normaliser.unsqueeze(-1)).clamp_max_(0.0)
        saved = (sums, cell_places) if cells is not None else (None, None)
        ctx.save_for_backward(hidden, weight, labels, log_normaliser, entry_ids, *saved)
        ctx.change, ctx.options, ctx.cells = change, options, cells
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        # The label's logit is a second rounding of one term of the sum: a loss of 0 could read
        # -1e-6.
        return (log_normaliser - label_logits).clamp_min_(0.0), entropies, entry_log_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor, _: Tensor | None, grad_entries: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, labels, log_normaliser, entry_ids, sums, cell_places = ctx.saved_tensors
        share, chunk_rows, _with_entropy, half, all_learn = ctx.options
        counts = grad_losses
        if grad_entries is not None:
            counts = (grad_losses != 0) | (grad_entries != 0).any(-1)
        # The host waits here; skipping the other tokens saves more.
        used = slice(None) if all_learn else counts.nonzero().squeeze(-1)
        with torch.autocast(hidden.device.type, enabled=False):
            grad_used, grad_weight = _gradients(
                hidden[used],
                weight,
                labels[used],
                log_normaliser[used],
                grad_losses[used],
                None if grad_entries is None else (entry_ids[used], grad_entries[used]),
                change=ctx.change,
                chunks=row_chunks(share.num_own, chunk_rows),
                needs_weight=ctx.needs_input_grad[1],
                half=half,
            )
            if ctx.cells is not None and grad_entries is not None:
                states = widen_once(hidden[used])
                CellSums(ctx.cells, states, weight, ctx.change, chunk_rows, half).add_gradients(
                    sums[used], grad_entries[used], cell_places[used], grad_used, grad_weight
                )
        grad_hidden = grad_used.to(ctx.dtype)
        if not all_learn:
            grad_hidden = hidden.new_zeros(hidden.shape, dtype=ctx.dtype).index_copy_(
                0, used, grad_hidden
            )
        return grad_hidden, grad_weight, None, None, None, None, None


def _log_normalisers(
    hidden: Tensor,
    weight: Tensor,
    label_logits: Tensor,
    entry_ids: Tensor | None,
    *,
    change: _Change,
    share: VocabularyShare,
    chunks: list[slice],
    with_entropy: bool,
    half: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log normalisers, entropies, and this rank's logits of entries."""
    hidden = widen_once(hidden)
    # Any finite start will do; a label's logit is -inf where the model excludes it.
    maximum = label_logits.clamp_min(torch.finfo(label_logits.dtype).min)
    total = torch.zeros_like(maximum)  # sum of exp(logit - maximum)
    weighted = torch.zeros_like(maximum)  # sum of exp(logit - maximum) * (logit - maximum)
    entries = None
    if entry_ids is not None:
        unknown = maximum.new_full(entry_ids.shape, -torch.inf)
        entries = chosen_entries(entry_ids, unknown, chunks)
    for number, chunk in enumerate(chunks):
        logits_nv = to_logits(matmul_wide(hidden, narrow(weight[chunk], half).T), *change)
        if entries is not None:
            entries.read_from(logits_nv, number)
        new_maximum = torch.maximum(maximum, logits_nv.amax(-1))
        shift = maximum - new_maximum
        logits_nv.sub_(new_maximum.unsqueeze(-1)).clamp_min_(MIN_EXPONENT)
        if with_entropy:
            exponentials_nv = logits_nv.exp()
            products = torch.linalg.vecdot(exponentials_nv, logits_nv)
            weighted = torch.exp(shift) * (weighted + shift * total) + products
        else:
            exponentials_nv = logits_nv.exp_()
        total = torch.exp(shift) * total + exponentials_nv.sum(-1)
        maximum = new_maximum
    if share.group is not None:
        new_maximum = share.maximum(maximum)
        shift = maximum - new_maximum
        parts = torch.stack((total, weighted + shift * total)) * torch.exp(shift)
        (total, weighted), maximum = share.sum(parts), new_maximum
    log_total = total.log()
    # H = log Z - E[logit], with both taken relative to the maximum.
    entropies = (log_total - weighted / total).clamp_min_(0.0) if with_entropy else None
    log_normaliser = maximum + log_total
    return log_normaliser, entropies, None if entries is None else entries.values


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    log_normaliser: Tensor,
    grad_losses: Tensor,
    entries_with_grad: tuple[Tensor, Tensor] | None,
    *,
    change: _Change,
    chunks: list[slice],
    needs_weight: bool,
    half: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Walk the vocabulary again.

    grad_logits = softmax * (grad_loss - sum of grad_entries) - grad_loss at the label + grad_entry
    at each entry.
    """
    hidden = widen_once(hidden)
    grad_hidden = widen(torch.zeros_like(hidden))
    grad_weight = torch.zeros_like(weight) if needs_weight else None
    scale, entries = grad_losses.unsqueeze(-1), None
    tokens = torch.arange(len(labels), device=labels.device)
    if entries_with_grad is not None:
        entries = chosen_entries(*entries_with_grad, chunks)
        scale = scale - entries.values.sum(-1, keepdim=True)
    for number, chunk in enumerate(chunks):
        rows = narrow(weight[chunk], half)
        logits_nv = to_logits(matmul_wide(hidden, rows.T), *change)
        slopes = logit_slopes(logits_nv, *change)
        log_probabilities_nv = logits_nv.sub_(log_normaliser.unsqueeze(-1))
        grad_logits_nv = log_probabilities_nv.clamp_min_(MIN_EXPONENT).exp_().mul_(scale)
        # A label elsewhere subtracts 0 somewhere: to find those inside, the host would wait.
        inside = (labels >= chunk.start) & (labels < chunk.stop)
        places = (labels - chunk.start).clamp(0, len(rows) - 1)
        grad_logits_nv[tokens, places] -= grad_losses.where(inside, 0.0)
        if entries is not None:
            entries.add_to(grad_logits_nv, number)
        grad_products_nv = grad_logits_nv if change == _UNCHANGED else grad_logits_nv.mul_(slopes)
        grad_products_nv = narrow_once(grad_products_nv, rows)
        grad_hidden += matmul_wide(grad_products_nv, rows)
        if grad_weight is not None:
            grad_weight[chunk] = matmul_wide(grad_products_nv.T, hidden).to(weight.dtype)
    return grad_hidden, grad_weight


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> None:
    if labels.dtype not in (torch.int64, torch.int32):  # torch takes uint8 for a mask
        raise ValueError(f"labels are {labels.dtype}, not int64: give labels.long()")
    if hidden.shape[:-1] != labels.shape or mask.shape != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be labels {tuple(labels.shape)} with the hidden "
            f"size appended, and loss_mask {tuple(mask.shape)} must have the labels' shape"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"the output layer's weight {tuple(weight.shape)} must be [vocabulary, "
            f"{hidden.shape[-1]}]: its columns are the hidden size"
        )


def _refuse_first(mask: Tensor) -> None:
    row = int(mask[:, 0].nonzero()[0])
    raise ValueError(
        f"teacher_loss_mask[{row}, 0] is True: the first token of a row has no context, so it "
        "has no loss; set it to False"
    )
