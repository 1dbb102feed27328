"""A model's probability of cells: sets of tokens, see `pipeline.distributions.cells`.

The walk over the vocabulary gives that of single tokens. The few thousand logits of *large* cells,
of several tokens, are computed again and added up.

Shapes: n places, g large cells, K chosen entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pipeline.losses.logits import (
    VocabularyShare,
    logit_slopes,
    matmul_wide,
    narrow,
    narrow_once,
    to_logits,
)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cell of each token of a vocabulary, on the CPU.

    Attributes:
        numbers: int64 [V], the least token of each token's cell.
        ruled_out: int64 [N], ascending: a * V + b if token b can't follow a.
    """

    numbers: Tensor
    ruled_out: Tensor
    _placed: dict[object, "PlacedCells"] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: ArrayLike, ruled_out: ArrayLike = ()) -> "Cells":
        """Take the two tables of `pipeline.distributions.cells.count_cells`."""
        own, ruled = (torch.from_numpy(np.array(each, np.int64)) for each in (numbers, ruled_out))
        return cls(own, ruled)

    def on(self, device: torch.device, share: VocabularyShare | None = None) -> "PlacedCells":
        """Place them on a device, for one rank's part of the vocabulary; cached."""
        own = (0, len(self.numbers)) if share is None else (share.first, share.num_own)
        key = (device, *own)
        if key not in self._placed:
            self._placed[key] = _place(self, range(own[0], sum(own)), device)
        return self._placed[key]


@dataclass(frozen=True)
class PlacedCells:
    """`Cells` on a device, from one rank's view.

    Attributes:
        places: int64 [V], a token's cell among this rank's large cells, else -1.
        is_large: bool [V], for cells on any ranks.
        tables: for the cells from a place on, int64 [cells, size], this rank's rows of their
            tokens, padded with -1.
    """

    numbers: Tensor
    ruled_out: Tensor
    places: Tensor
    is_large: Tensor
    tables: tuple[tuple[int, Tensor], ...]

    def number_of(self, token_ids: Tensor) -> Tensor:
        """Return the cells of tokens; unknown tokens and -1 unchanged."""
        inside = (token_ids >= 0) & (token_ids < len(self.numbers))
        return torch.where(inside, self.numbers[token_ids.where(inside, 0)], token_ids)

    def rule_out(self, token_ids: Tensor, before: Tensor) -> Tensor:
        """Return which tokens can't follow `before`."""
        codes = before * len(self.numbers) + token_ids
        if not len(self.ruled_out):
            return torch.zeros_like(codes, dtype=torch.bool)
        place = torch.searchsorted(self.ruled_out, codes).clamp_max(len(self.ruled_out) - 1)
        return (token_ids >= 0) & (self.ruled_out[place] == codes)

    def split(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens of small cells, and places of large ones; -1 elsewhere."""
        inside = (token_ids >= 0) & (token_ids < len(self.numbers))
        known = token_ids.where(inside, 0)
        large = inside & self.is_large[known]
        return token_ids.masked_fill(large, -1), self.places[known].where(large, -1)


@dataclass(frozen=True)
class CellSums:
    """The walk over large cells: log-sum-exps of logits, and their gradients.

    `change` is scale and cap of `OutputLayer`, `half` an autocast's dtype.
    """

    cells: PlacedCells
    hidden: Tensor
    weight: Tensor
    change: tuple[float, float | None]
    chunk_rows: int
    half: torch.dtype | None = None

    def read_into(self, values_nk: Tensor, places_nk: Tensor) -> Tensor:
        """Return values, with this rank's log-sum-exps where `places_nk` names a cell."""
        for start, rows in self._chunks():
            logits_ngs = self._logits(rows).masked_fill(rows < 0, -torch.inf)
            column = places_nk - start
            inside = (column >= 0) & (column < len(rows))
            found = logits_ngs.logsumexp(-1).gather(1, column.clamp(0, len(rows) - 1))
            values_nk = torch.where(inside, found, values_nk)
        return values_nk

    def add_gradients(
        self,
        sums_nk: Tensor,
        grads_nk: Tensor,
        places_nk: Tensor,
        grad_hidden: Tensor,
        grad_weight: Tensor | None,
    ) -> None:
        """Add the gradients of log-sum-exps, given those over all ranks."""
        tokens = torch.arange(len(places_nk), device=places_nk.device)
        tokens = tokens.unsqueeze(-1).expand_as(places_nk)
        for start, rows in self._chunks():
            column, count = places_nk - start, len(rows)
            column = column.where((column >= 0) & (column < count), count)
            # One more column takes the cells of other chunks; a cell named twice counts twice.
            shape = len(places_nk), count + 1
            grads = grads_nk.new_zeros(shape)
            grads.index_put_((tokens, column), grads_nk, accumulate=True)
            sums = sums_nk.new_full(shape, torch.inf).scatter_(1, column, sums_nk)
            logits_ngs = self._logits(rows)
            slopes = logit_slopes(logits_ngs, *self.change)
            shares = torch.exp(logits_ngs - sums[:, :-1, None]).masked_fill(rows < 0, 0.0)
            ids, weight = rows.clamp_min(0).flatten(), self._weight(rows)
            grad_nv = narrow_once((grads[:, :-1, None] * shares * slopes).flatten(1), weight)
            grad_hidden += matmul_wide(grad_nv, weight)
            if grad_weight is not None:
                products = matmul_wide(grad_nv.T, self.hidden)
                grad_weight.index_add_(0, ids, products.to(grad_weight.dtype))

    def _logits(self, rows: Tensor) -> Tensor:
        products = matmul_wide(self.hidden, self._weight(rows).T)
        logits: Tensor = to_logits(products, *self.change).unflatten(1, rows.shape)
        return logits

    def _weight(self, rows: Tensor) -> Tensor:
        return narrow(self.weight[rows.clamp_min(0).flatten()], self.half)

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        for start, table in self.cells.tables:
            step = max(1, self.chunk_rows // table.shape[1])
            for first in range(0, len(table), step):
                yield start + first, table[first : first + step]


def _place(cells: Cells, own: range, device: torch.device) -> PlacedCells:
    numbers = cells.numbers.numpy()
    sizes = np.bincount(numbers, minlength=len(numbers))
    is_large = sizes[numbers] > 1
    held = np.flatnonzero(is_large)
    held = held[(held >= own.start) & (held < own.stop)]
    # Sorted by cell; cells of nearly equal size share a table.
    order = held[np.argsort(numbers[held], kind="stable")]
    distinct, counts = np.unique(numbers[order], return_counts=True)
    starts = np.cumsum(counts) - counts
    widths = 1 << np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64)
    tables, place_of, place = [], np.full(len(numbers), -1, np.int64), 0
    for width in np.unique(widths).tolist():
        chosen = np.flatnonzero(widths == width)
        table = np.full((len(chosen), width), -1, np.int64)
        for line, cell in enumerate(chosen.tolist()):
            tokens = order[starts[cell] : starts[cell] + counts[cell]]
            table[line, : len(tokens)] = tokens - own.start
            place_of[numbers == distinct[cell]] = place + line
        tables.append((place, torch.from_numpy(table).to(device)))
        place += len(chosen)
    as_tensor = torch.from_numpy
    return PlacedCells(
        cells.numbers.to(device),
        cells.ruled_out.to(device),
        as_tensor(place_of).to(device),
        as_tensor(is_large).to(device),
        tuple(tables),
    )
