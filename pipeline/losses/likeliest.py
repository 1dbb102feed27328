"""The likeliest next tokens, found in the walk over the vocabulary that also gives the losses.

Most chunks cost little: a token's likeliest so far are compared only with larger logits.

Shapes: n tokens, v rows of the vocabulary, K likeliest tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.losses.cross_entropy import wide_products
from pipeline.losses.logits import (
    MIN_EXPONENT,
    OutputLayer,
    VocabularyShare,
    autocast_dtype,
    matmul_wide,
    narrow,
    row_chunks,
    rows_at_once,
    to_logits,
    widen,
    widen_once,
)
from pipeline.losses.tail import TailDraws

_TOKENS_AT_ONCE = 16  # whose whole logits are held to order equal ones


@torch.no_grad()
def score_with_likeliest(
    hidden: Tensor,
    output_layer: OutputLayer,
    labels: Tensor,
    top_k: int,
    *,
    vocab_size: int | None = None,
    share: VocabularyShare | None = None,
    tail: TailDraws | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses of labels and a model's likeliest tokens, from one walk; no gradient.

    States are float [n, H], labels int64 [n], -1 for none. Only tokens below `vocab_size` are
    chosen; None: all rows. If ranks `share` the layer, all call with the same states and labels,
    and get the same. `tail` draws tokens other than the likeliest and the label.

    Returns losses, at least fp32 [n], nats; token ids, int64 [n, K], likeliest first, equally
    likely ones by ascending id; and their log-probabilities over all rows, [n, K]. ValueError if
    `top_k` exceeds the number of tokens.
    """
    share = VocabularyShare.of(output_layer.vocab_size, None, None) if share is None else share
    tail = tail if tail is not None and tail.ids.shape[1] else None
    num_ids = min(share.vocab_size, vocab_size or share.vocab_size)
    if not 1 <= top_k <= num_ids:
        raise ValueError(f"the likeliest {top_k} tokens of {num_ids}: ask for 1 to {num_ids}")
    half = autocast_dtype(hidden)
    hidden = narrow(hidden, half)
    output_layer = replace(output_layer, weight=narrow(output_layer.weight, half))
    ids, logits, log_normaliser = _walk_shared(hidden, output_layer, top_k, num_ids, share, tail)
    if tail is not None:
        excluded = torch.cat([ids, labels.unsqueeze(-1)], -1)
        with torch.autocast(hidden.device.type, enabled=False):
            tail.draw(hidden, output_layer, excluded, num_ids, share)
    own = share.own_ids(labels)
    products = (widen(hidden) * widen(output_layer.weight[own.clamp_min(0)])).sum(-1)
    label_products = share.sum(products.where(own >= 0, 0.0))
    label_logits = to_logits(label_products, output_layer.scale, output_layer.cap)
    losses = (log_normaliser - label_logits).clamp_min_(0.0)
    return losses, ids, (logits - log_normaliser.unsqueeze(-1)).clamp_max_(0.0)


def _walk_shared(
    hidden_nh: Tensor,
    layer: OutputLayer,
    top_k: int,
    num_ids: int,
    share: VocabularyShare,
    tail: TailDraws | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if share.group is None:
        own = replace(layer, weight=layer.weight[: share.num_own])
        return _walk(hidden_nh, own, top_k, num_ids, tail)
    num_own = min(max(num_ids - share.first, 0), share.num_own)
    ids = torch.full((len(hidden_nh), top_k), -1, device=hidden_nh.device)
    logits = widen(hidden_nh).new_full(ids.shape, -torch.inf)
    log_normaliser = logits.new_full((len(ids),), -torch.inf)
    if share.num_own:
        own = replace(layer, weight=layer.weight[: share.num_own])
        few = min(top_k, num_own)
        found, values, log_normaliser = _walk(
            hidden_nh, own, max(few, 1), max(num_own, 1), tail if num_own else None, share.first
        )
        ids[:, :few], logits[:, :few] = found[:, :few] + share.first, values[:, :few]
    # Ranks, and the tokens of each, come by rising id; the sort leaves equal ones in their order.
    ids, logits = share.gather(ids), share.gather(logits)
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    log_normaliser = share.gather(log_normaliser.unsqueeze(-1)).logsumexp(-1)
    return ids.gather(-1, order)[:, :top_k], logits[:, :top_k], log_normaliser


def _walk(
    hidden_nh: Tensor,
    layer: OutputLayer,
    top_k: int,
    num_ids: int,
    tail: TailDraws | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [n, K], logits [n, K] and log normalisers [n]; row 0 is `tail`'s token `first`."""
    num_rows = layer.vocab_size
    with torch.autocast(hidden_nh.device.type, enabled=False):
        states = widen_once(hidden_nh)
        maximum = widen(hidden_nh).new_full((len(states),), torch.finfo(torch.float32).min)
        total, top = torch.zeros_like(maximum), _RunningTop(maximum, top_k)
        at_once = rows_at_once(len(states), states.device)
        if tail is None:
            chunks = row_chunks(num_rows, at_once)
        else:
            chunks = tail.chunks(num_rows, at_once, first)
        for chunk in chunks:
            products_nv = matmul_wide(states, layer.weight[chunk].T)
            logits_nv = to_logits(products_nv, layer.scale, layer.cap)
            largest = logits_nv.amax(-1)
            if chunk.start < num_ids:
                top.add(logits_nv[:, : num_ids - chunk.start], chunk.start, largest)
            new_maximum = torch.maximum(maximum, largest)
            exponents_nv = logits_nv.sub_(new_maximum.unsqueeze(-1)).clamp_min_(MIN_EXPONENT)
            total = torch.exp(maximum - new_maximum) * total + exponents_nv.exp_().sum(-1)
            maximum = new_maximum
            if tail is not None and chunk.start < num_ids:
                tail.see(exponents_nv[:, : num_ids - chunk.start], maximum, first + chunk.start)
        top.tell_apart(hidden_nh, layer, num_ids)
    return top.ids, top.values, maximum + total.log()


class _RunningTop:
    """The largest K logits seen so far, equal ones by ascending id.

    torch doesn't define which of equal values `topk` returns. So K + 1 are taken per chunk; if the
    last two are equal, `tell_apart` checks again.
    """

    def __init__(self, like_n: Tensor, top_k: int) -> None:
        self.values = like_n.new_full((len(like_n), top_k), -torch.inf)
        self.ids = torch.full_like(self.values, -1, dtype=torch.int64)
        self._tied = like_n.new_full((len(like_n),), -torch.inf)

    def add(self, logits_nv: Tensor, start: int, largest_n: Tensor) -> None:
        top_k = self.values.shape[1]
        # An equal logit comes later here, so it changes nothing. NaN is let through, to be seen.
        rows = (~(largest_n <= self.values[:, -1])).nonzero().squeeze(-1)
        values, places = logits_nv[rows].topk(min(top_k + 1, logits_nv.shape[1]))
        if values.shape[1] > top_k:
            is_tied = values[:, top_k] == values[:, top_k - 1]
            tied = values[:, top_k].masked_fill(~is_tied, -torch.inf)
            self._tied[rows] = torch.maximum(self._tied[rows], tied)
        places, order = places.sort(-1)
        values = torch.cat([self.values[rows], values.gather(-1, order)], -1)
        ids = torch.cat([self.ids[rows], places + start], -1)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        self.values[rows] = values[:, :top_k]
        self.ids[rows] = ids.gather(-1, order[:, :top_k])

    def tell_apart(self, hidden_nh: Tensor, layer: OutputLayer, num_ids: int) -> None:
        """Take the first of equal tokens where `topk` may have taken others."""
        top_k = self.values.shape[1]
        is_open = (self._tied >= self.values[:, -1]) & (self._tied > -torch.inf)
        for rows in is_open.nonzero().squeeze(-1).split(_TOKENS_AT_ONCE):
            products = wide_products(hidden_nh[rows], layer.weight[:num_ids])
            logits = to_logits(products, layer.scale, layer.cap)
            last = logits.topk(top_k).values[:, -1:]
            is_above, is_last = logits > last, logits == last
            room = top_k - is_above.sum(-1, keepdim=True)
            ids = (is_above | (is_last & (is_last.cumsum(-1) <= room))).nonzero()[:, 1]
            ids = ids.view(-1, top_k)
            values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
            self.values[rows], self.ids[rows] = values, ids.gather(-1, order)
