"""Chosen tokens of the vocabulary, met by a walk in chunks (`pipeline.losses.cross_entropy`)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeline.losses.loss_checks import refuse_any


def chosen_entries(
    entry_ids: Tensor, values: Tensor, chunks: list[slice]
) -> "ChosenEntries | ComparedEntries":
    """Prepare entries, int64 [n, K], for a walk."""
    if entry_ids.is_cuda:
        return ComparedEntries(entry_ids, values, chunks)
    return ChosenEntries.of(entry_ids, values, chunks)


@dataclass(frozen=True)
class ComparedEntries:
    """Entries compared with each chunk: more work, but the host doesn't wait for a device."""

    entry_ids: Tensor
    values: Tensor
    chunks: list[slice]

    def read_from(self, logits_nv: Tensor, number: int) -> None:
        """Set the values of a chunk's entries to their logits."""
        places, inside = self._inside(number)
        self.values.copy_(logits_nv.gather(-1, places).where(inside, self.values))

    def add_to(self, grad_logits_nv: Tensor, number: int) -> None:
        """Add the values of a chunk's entries to its gradients; repeated tokens add up."""
        places, inside = self._inside(number)
        added = self.values.where(inside, 0.0)
        # Entry by entry: no place is written twice at once, so sums keep their order.
        for column in range(places.shape[-1]):
            own = slice(column, column + 1)
            grad_logits_nv.scatter_add_(-1, places[:, own], added[:, own])

    def _inside(self, number: int) -> tuple[Tensor, Tensor]:
        chunk = self.chunks[number]
        inside = (self.entry_ids >= chunk.start) & (self.entry_ids < chunk.stop)
        return (self.entry_ids - chunk.start).clamp(0, chunk.stop - chunk.start - 1), inside


@dataclass(frozen=True)
class ChosenEntries:
    """Entries sorted by the chunk that holds them, which then needs no comparisons.

    Values are float [n, K], in the caller's order; `bounds` count the entries before each chunk,
    and all. Sorted, int64: places in the flat [n * K], tokens (rows of the logits) and ids
    (columns).
    """

    values: Tensor
    chunks: list[slice]
    bounds: list[int]
    places: Tensor
    tokens: Tensor
    ids: Tensor

    @staticmethod
    def of(entry_ids: Tensor, values: Tensor, chunks: list[slice]) -> "ChosenEntries":
        """Sort entries int64 [n, K]; no chunk holds those of -1."""
        ids, places = entry_ids.flatten().sort()
        # Made on the device, and read once: copying to it would make the host wait, too.
        length, end = (chunks[0].stop, chunks[-1].stop) if chunks else (0, 0)
        edges = (torch.arange(len(chunks) + 1, device=ids.device) * length).clamp_max_(end)
        bounds = torch.searchsorted(ids, edges).tolist()
        tokens = places // max(1, entry_ids.shape[-1])
        return ChosenEntries(values, chunks, bounds, places, tokens, ids)

    def read_from(self, logits_nv: Tensor, number: int) -> None:
        """See `ComparedEntries`."""
        places, cells = self._cells(number)
        self.values.view(-1)[places] = logits_nv[cells]

    def add_to(self, grad_logits_nv: Tensor, number: int) -> None:
        """See `ComparedEntries`."""
        places, cells = self._cells(number)
        grad_logits_nv.index_put_(cells, self.values.view(-1)[places], accumulate=True)

    def _cells(self, number: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        those = slice(*self.bounds[number : number + 2])
        return self.places[those], (self.tokens[those], self.ids[those] - self.chunks[number].start)


def check_entries(entry_ids: Tensor, mask: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless entries are int64 [..., K], and counted ones tokens or -1."""
    if entry_ids.shape[:-1] != mask.shape or entry_ids.dtype != torch.int64:
        raise ValueError(
            f"entry_ids {entry_ids.dtype} {tuple(entry_ids.shape)} must be int64, the labels' "
            f"shape {tuple(mask.shape)} with the number of entries appended"
        )
    outside = mask.unsqueeze(-1) & ((entry_ids < -1) | (entry_ids >= vocab_size))
    remedy = "entries are the student's tokens, -1 if there is none"
    refuse_any(outside, partial(refuse_ids, "entry_ids", entry_ids, outside, vocab_size, remedy))


def refuse_ids(name: str, ids: Tensor, outside: Tensor, vocab_size: int, remedy: str) -> None:
    """Raise ValueError for the first of the ids `outside` a vocabulary."""
    place = outside.nonzero()[0].tolist()
    raise ValueError(
        f"{name}{place} is {int(ids[tuple(place)])}, outside the vocabulary of {vocab_size}: "
        f"{remedy}"
    )
