"""Draws from a model's next tokens except its likeliest, in proportion to their probability.

The walk that finds the likeliest tokens also gives the mass of each block of 256. A draw takes a
block, then one of its tokens, both by the largest of log-mass plus Gumbel noise. Logits are
computed again for drawn blocks, and those with an excluded token.

Noise is a hash of a key (`draw_keys`), the draw, and the block or token, so batch, chunk, device
and ranks don't matter.

Shapes: n places, v rows of the vocabulary, b blocks, K excluded tokens.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pipeline.losses.logits import (
    OutputLayer,
    VocabularyShare,
    matmul_wide,
    row_chunks,
    to_logits,
    widen_once,
)

BLOCK = 256
"""Tokens whose mass is added up. Another size draws other tokens."""

_WORD = 0xFFFFFFFF
_ELEMENTS_AT_ONCE = 1 << 20
# For a token that the model excludes; -inf is for one that may not be drawn.
_LEAST_LOGIT = -1e30
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def draw_keys(input_ids: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """Return the key of the draws after each token of a text, int64 [l, 2] below 2^32.

    `input_ids` are all that a model reads. Texts with a common beginning have different keys, too,
    so noise averages out over texts.
    """
    digest = blake2b(input_ids.astype("<i4").tobytes(), digest_size=8, key=seed.to_bytes(8))
    first = np.uint64(int.from_bytes(digest.digest(), "little"))
    # splitmix64: a counter, mixed.
    keys = first + _GOLDEN * np.arange(1, len(input_ids) + 1, dtype=np.uint64)
    keys = (keys ^ (keys >> np.uint64(30))) * _MIX[0]
    keys = (keys ^ (keys >> np.uint64(27))) * _MIX[1]
    keys ^= keys >> np.uint64(31)
    return np.stack([keys >> np.uint64(32), keys & np.uint64(_WORD)], axis=1).astype(np.int64)


def row_draw_keys(input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the keys of rows' places, int64 [rows, T, 2], on the host; segments are texts.

    The seed is the default of `vocag score`.
    """
    tokens = input_ids.numpy()
    keys = np.zeros((*tokens.shape, 2), np.int64)
    for row, bounds in enumerate(cu_seqlens.tolist()):
        for start, stop in pairwise(bounds):
            if stop > start:
                keys[row, start:stop] = draw_keys(tokens[row, start:stop], seed=0)
    return torch.from_numpy(keys)


class TailDraws:
    """Draws at each place, with replacement; `score_with_likeliest` fills it.

    Attributes:
        ids: int64 [n, draws], the drawn tokens, after the walk.
    """

    def __init__(self, keys: Tensor, num_draws: int) -> None:
        """Draw `num_draws` times per place, possibly 0, with keys of `draw_keys`."""
        self.ids = torch.empty((len(keys), num_draws), dtype=torch.int64, device=keys.device)
        self._keys = keys
        self._log_masses: list[tuple[int, Tensor]] = []

    @staticmethod
    def chunks(num_rows: int, at_once: int, first: int) -> list[slice]:
        """Cut rows from token `first` on into chunks of about `at_once` that end with a block."""
        step = max(1, at_once // BLOCK) * BLOCK
        inner = range(step - first % BLOCK, num_rows, step)
        return [slice(*bounds) for bounds in pairwise([0, *inner, num_rows])]

    def see(self, exponentials_nv: Tensor, maximum_n: Tensor, first: int) -> None:
        """Add up a chunk's blocks, relative to a maximum; its first token is `first`."""
        lead = first % BLOCK
        rest = -(lead + exponentials_nv.shape[1]) % BLOCK
        if lead or rest:
            exponentials_nv = pad(exponentials_nv, (lead, rest))
        masses = exponentials_nv.unflatten(1, (-1, BLOCK)).sum(-1)
        self._log_masses.append((first // BLOCK, masses.log() + maximum_n.unsqueeze(-1)))

    def draw(
        self,
        hidden_nh: Tensor,
        layer: OutputLayer,
        excluded_nk: Tensor,
        num_ids: int,
        share: VocabularyShare,
    ) -> None:
        """Draw tokens below `num_ids`, without the excluded ones; all ranks must call."""
        excluded_nk = excluded_nk.where(excluded_nk < num_ids, -1)
        shape = len(hidden_nh), -(-num_ids // BLOCK)
        wide = torch.promote_types(hidden_nh.dtype, torch.float32)
        log_masses_nb = hidden_nh.new_full(shape, -torch.inf, dtype=wide)
        for block, masses in self._log_masses:
            log_masses_nb[:, block : block + masses.shape[1]] = masses
        self._log_masses = []
        tail = _Tail(widen_once(hidden_nh), layer, excluded_nk, num_ids, share)
        # Subtracting the excluded mass would leave only rounding if it is nearly all.
        places, columns = (excluded_nk >= 0).nonzero(as_tuple=True)
        pairs = torch.unique(excluded_nk[places, columns] // BLOCK * len(hidden_nh) + places)
        blocks, places = pairs // len(hidden_nh), pairs % len(hidden_nh)
        for own, _, logits in tail.of_blocks(blocks, places):
            log_masses_nb[places[own], blocks[own]] = logits.logsumexp(-1)
        log_masses_nb = share.logsumexp(log_masses_nb)
        num_draws = self.ids.shape[1]
        numbers = torch.arange(num_draws, device=excluded_nk.device)
        chosen = torch.empty_like(self.ids)
        every = torch.arange(log_masses_nb.shape[1], device=excluded_nk.device)
        for some in row_chunks(len(hidden_nh), max(1, _ELEMENTS_AT_ONCE // len(every))):
            for number in range(num_draws):
                noise = _gumbel(self._keys[some], 2 * numbers[number : number + 1], every)
                chosen[some, number] = (log_masses_nb[some] + noise).argmax(-1)
        drawn = torch.zeros_like(chosen).view(-1)
        noisy = log_masses_nb.new_full(drawn.shape, -torch.inf)
        chosen, pairs = chosen.view(-1), torch.arange(len(drawn), device=drawn.device)
        for own, ids, logits in tail.of_blocks(chosen, pairs // max(1, num_draws)):
            keys, streams = self._keys[own // num_draws], 2 * numbers[own % num_draws] + 1
            noisy[own], best = (logits + _gumbel(keys, streams, ids)).max(-1)
            drawn[own] = ids[:, 0] + best
        winner = share.gather(noisy.unsqueeze(-1)).argmax(-1, keepdim=True)
        self.ids[:] = share.gather(drawn.unsqueeze(-1)).gather(-1, winner).view_as(self.ids)

    def behind(self, ids_nk: Tensor, log_probs_nk: Tensor) -> tuple[Tensor, Tensor]:
        """Append a free place, then the draws, to entries for `pipeline.distributions`."""
        ids = torch.cat([pad(ids_nk, (0, 1), value=-1), self.ids], -1)
        return ids, pad(log_probs_nk, (0, 1 + self.ids.shape[1]), value=-torch.inf)


class _Tail:
    """Logits of this rank's part of a block, -inf for excluded tokens."""

    def __init__(
        self,
        states_nh: Tensor,
        layer: OutputLayer,
        excluded_nk: Tensor,
        num_ids: int,
        share: VocabularyShare,
    ) -> None:
        self._states, self._layer, self._excluded = states_nh, layer, excluded_nk
        self._own = range(share.first, min(share.first + share.num_own, num_ids))

    def of_blocks(self, blocks: Tensor, places: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield some pairs' numbers [m], their blocks' tokens and logits, both [m, BLOCK].

        A pair is a block and a place; excluded tokens and those of other ranks have -inf. Only
        products go block by block: a GPU takes longer to start a small kernel than to run it.
        """
        blocks, order = blocks.sort(stable=True)
        found, counts = blocks.unique_consecutive(return_counts=True)
        bounds = pairwise([0, *counts.cumsum(0).tolist()])
        pieces = list(zip(found.tolist(), bounds, strict=True))
        inside = torch.arange(BLOCK, device=blocks.device)
        # At most one block's logits for each place.
        for some in row_chunks(
            len(order), min(_ELEMENTS_AT_ONCE // BLOCK, max(1, len(self._states)))
        ):
            own, ids = order[some], blocks[some].unsqueeze(-1) * BLOCK + inside
            states = self._states[places[own]]
            products = states.new_zeros(
                ids.shape, dtype=torch.promote_types(states.dtype, torch.float32)
            )
            for block, (start, stop) in pieces:
                rows = slice(max(start, some.start) - some.start, min(stop, some.stop) - some.start)
                if rows.start < rows.stop:
                    self._multiply(states[rows], block, products[rows])
            yield own, ids, self._to_logits(products, ids, places[own])

    def _multiply(self, states: Tensor, block: int, products: Tensor) -> None:
        first = block * BLOCK
        ids = range(max(first, self._own.start), min(first + BLOCK, self._own.stop))
        if ids:
            rows = self._layer.weight[ids.start - self._own.start : ids.stop - self._own.start]
            products[:, ids.start - first : ids.stop - first] = matmul_wide(states, rows.T)

    def _to_logits(self, products: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        logits = to_logits(products, self._layer.scale, self._layer.cap).clamp_min(_LEAST_LOGIT)
        # One more column takes tokens of other blocks.
        excluded = self._excluded[places] - ids[:, :1]
        excluded = excluded.where((excluded >= 0) & (excluded < BLOCK), BLOCK)
        is_out = torch.zeros((len(ids), BLOCK + 1), dtype=torch.bool, device=ids.device)
        is_out = is_out.scatter(1, excluded, True)[:, :-1]
        is_out |= (ids < self._own.start) | (ids >= self._own.stop)
        return logits.masked_fill(is_out, -torch.inf)


def _gumbel(keys_n: Tensor, streams: Tensor, counters_v: Tensor) -> Tensor:
    first = _mix(keys_n[:, 0] + streams).unsqueeze(-1)
    hashed = _mix(_mix(counters_v ^ first) ^ keys_n[:, 1:])
    # The smallest exponential value wins: small ones are finely resolved, and none is 0.
    uniform = (hashed.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def _mix(words: Tensor) -> Tensor:
    """Return 32-bit hashes of numbers below 2^33; products stay within 63 bits."""
    words = words & _WORD
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & _WORD
    words = ((words ^ (words >> 15)) * 0x735A2D97) & _WORD
    return words ^ (words >> 15)
