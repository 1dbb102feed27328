"""A teacher's likeliest next tokens, packed and stored with its losses.

A document of T tokens has T + 1 *positions*, an empty one none. Position l follows its first l
tokens, and goes with the loss of token l.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.distribution_rule import DistributionRule
from schemas.records import Count
from schemas.safetensors_view import view_vector

LARGEST_MASS = 1.001
"""Upper bound on the sum of the least masses that round to a position's entries."""

_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("<u1"), "float16": np.dtype("<f2")}
_SAFETENSORS = {"uint8": "U8", "float16": "F16"}
_RANGE = 20.0  # largest nats in 8 bits
_LEAST_FP16 = float(np.finfo(np.float16).min)
_BLOCK = 1 << 16  # ids packed at once; a multiple of 8, so that blocks end with a byte


@dataclass(frozen=True)
class EntriesRecord:
    """Totals of a sidecar's entries; the mass is of stored values."""

    num_positions: Count
    num_entries: Count
    mass_sum: float


@dataclass(frozen=True, eq=False)
class ShardEntries:
    """Stored distributions of one shard's D documents, E entries at P positions.

    Attributes:
        counts: uint8 [P], entries per position.
        starts: int64 [D + 1]; document d owns entries starts[d]:starts[d + 1].
        ids: uint8 [ceil(E * id_bits / 8)]; entry e's id begins at bit e * id_bits, the lowest bit
            of each byte and id first.
        log_probs: uint8 or float16 [E], as in the rule; falling within a position.
        position_starts: int64 [D + 1], like starts.
        draw_ids: uint8 [ceil(N * draws * id_bits / 8)], packed like ids: the draws of each of the N
            positions with entries.
    """

    rule: DistributionRule
    counts: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ids: NDArray[np.uint8]
    log_probs: NDArray[Any]
    position_starts: NDArray[np.int64]
    draw_ids: NDArray[np.uint8]

    @cached_property
    def first_draws(self) -> NDArray[np.int64]:
        """Draws before each document's, int64 [D + 1]."""
        drawn = np.append(0, np.cumsum(self.counts > 0, dtype=np.int64))[self.position_starts]
        return drawn * self.rule.draws

    def describe(self) -> EntriesRecord:
        """Return the score manifest's record."""
        stored = self.log_probs
        codes = stored if stored.dtype == np.uint8 else stored.view(np.uint16)
        values = stored_values(self.rule.log_probs)[0].tolist()
        # Summed by code, so neither order nor vector instructions change it.
        present = enumerate(np.bincount(codes, minlength=len(values)).tolist())
        mass = fsum(count * exp(values[code]) for code, count in present if count)
        return EntriesRecord(int(np.count_nonzero(self.counts)), len(codes), mass)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return a sidecar's tensors by name."""
        draws = {"draw_ids": self.draw_ids} if self.rule.draws else {}
        return {
            "entry_counts": self.counts,
            "entry_starts": self.starts.astype(np.uint64),
            "entry_ids": self.ids,
            "entry_log_probs": self.log_probs,
            **draws,
        }


@dataclass(frozen=True, eq=False)
class TopTokens:
    """Next tokens before packing, dense, filled by engines.

    Ids are int32 [P, K], -1 without an entry; there log-probabilities, uint8 or float16 [P, K] as
    stored, and draws, int32 [P, draws], are undefined.
    """

    rule: DistributionRule
    ids: NDArray[np.int32]
    log_probs: NDArray[Any]
    draws: NDArray[np.int32]

    @classmethod
    def empty(cls, starts: NDArray[np.int64], rule: DistributionRule) -> "TopTokens":
        """Return positions without entries for documents whose tokens start at int64 [D + 1]."""
        shape = int(position_starts(starts)[-1]), rule.top_k
        draws = np.zeros((shape[0], rule.draws), np.int32)
        log_probs = np.zeros(shape, _DTYPES[rule.log_probs])
        return cls(rule, np.full(shape, -1, np.int32), log_probs, draws)

    def put(
        self,
        positions: NDArray[np.int64],
        ids: NDArray[np.integer],
        log_probs: NDArray[np.floating],
    ) -> None:
        """Store some positions' likeliest tokens, limited by the rule.

        Positions are int64 [n], distinct; ids integers [n, K]; log-probabilities float [n, K],
        nats, falling, no NaN, -inf for missing tokens.
        """
        is_entry = log_probs > -np.inf
        if self.rule.top_mass < 1:  # a mass that rounds to 1 would drop later ones
            masses = np.cumsum(np.exp(log_probs, dtype=np.float64), axis=1)
            is_entry[:, 1:] &= masses[:, :-1] < self.rule.top_mass
        if self.rule.entropy_above:
            is_entry &= (least_entropies(log_probs) > self.rule.entropy_above)[:, None]
        self.ids[positions] = np.where(is_entry, ids, -1)
        self.log_probs[positions] = to_stored(log_probs, self.rule.log_probs)

    def pack(self, starts: NDArray[np.int64]) -> ShardEntries:
        """Pack the entries of documents whose tokens start at int64 [D + 1]."""
        is_entry = self.ids >= 0
        counts = is_entry.sum(axis=1, dtype=np.uint8)
        positions = position_starts(starts)
        return ShardEntries(
            rule=self.rule,
            counts=counts,
            starts=np.append(0, np.cumsum(counts, dtype=np.int64))[positions],
            ids=pack_ids(self.ids[is_entry], self.rule.id_bits),
            log_probs=self.log_probs[is_entry],
            position_starts=positions,
            draw_ids=pack_ids(self.draws[counts > 0].ravel(), self.rule.id_bits),
        )


def position_starts(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return documents' first positions from their first tokens, int64 [D + 1]."""
    positions: NDArray[np.int64] = starts + np.append(0, np.cumsum(np.diff(starts) > 0))
    return positions


def least_entropies(log_probs: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return lower bounds of entropies, float64 [n], nats, from the likeliest tokens.

    `log_probs` are float [n, K], nats, falling, -inf for missing tokens. No other is likelier than
    the least of these.
    """
    nats = np.where(log_probs > -np.inf, log_probs, 0.0).astype(np.float64)
    masses = np.exp(nats) * (log_probs > -np.inf)
    rest = np.maximum(1 - masses.sum(axis=1), np.finfo(np.float64).tiny)
    of_rest = rest * np.minimum(nats.min(axis=1), np.log(rest))
    entropies: NDArray[np.float64] = -(masses * nats).sum(axis=1) - of_rest
    return entropies


def to_stored(log_probs: NDArray[np.floating], kind: str) -> NDArray[Any]:
    """Round log-probabilities to their stored form, within `largest_error`."""
    nats: NDArray[Any] = np.minimum(log_probs, 0.0)
    if kind == "float16":
        nats = np.maximum(nats, _LEAST_FP16)
    else:
        nats = np.rint(255 * np.sqrt(np.minimum(-nats, _RANGE) / _RANGE))
    return nats.astype(_DTYPES[kind])


def largest_error(log_probs: NDArray[np.floating], kind: str) -> NDArray[Any]:
    """Return the largest error of stored log-probabilities, nats; infinite beyond 20 in uint8."""
    nats: NDArray[Any] = -np.asarray(log_probs, np.float64)
    if kind == "float16":
        return nats * 2.0**-11 + 2.0**-25
    error: NDArray[Any] = np.sqrt(_RANGE * nats) / 255 + _RANGE / (4 * 255**2)
    return np.where(nats < _RANGE, error, np.inf)


@cache
def stored_values(kind: str) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return stored log-probabilities by code, and the least mass rounded to each, float64.

    The former are float32 [256 or 65536], nats, NaN for invalid codes.
    """
    if kind == "uint8":
        codes = np.arange(256)
        values = -_RANGE * (codes / 255) ** 2
        least = np.exp(-_RANGE * ((codes + 0.5) / 255) ** 2)
    else:
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
        values = np.where((halves <= 0) & np.isfinite(halves), halves, np.nan)
        least = np.exp(values * (1 + 2.0**-11) - 2.0**-25)
    least[values <= (-_RANGE if kind == "uint8" else _LEAST_FP16)] = 0.0
    return values.astype(np.float32), least


def pack_ids(ids: NDArray[np.integer], num_bits: int) -> NDArray[np.uint8]:
    """Pack ids, `num_bits` each, the lowest bit first.

    Example:
        >>> pack_ids(np.array([1, 3]), 9).tolist()
        [1, 6, 0]
    """
    packed = np.empty(-(-len(ids) * num_bits // 8), np.uint8)
    for start in range(0, len(ids), _BLOCK):
        part = ids[start : start + _BLOCK].astype("<u4").view(np.uint8).reshape(-1, 4)
        bits = np.unpackbits(part, axis=1, bitorder="little")[:, :num_bits]
        data = np.packbits(bits, bitorder="little")
        first = start * num_bits // 8
        packed[first : first + len(data)] = data
    return packed


def decode_entries(
    data: bytes | memoryview,
    body: int,
    header: Mapping[str, Any],
    *,
    rule: DistributionRule,
    starts: NDArray[np.int64],
) -> ShardEntries:
    """Return a sidecar's entries, as views.

    `starts`, int64 [D + 1], are documents' first tokens. ValueError or KeyError for missing
    tensors, or sizes that contradict each other or the rule; `pipeline.scoring.entries` checks
    contents.
    """
    kind = _SAFETENSORS[rule.log_probs]
    counts = view_vector(data, body, header["entry_counts"], "U8")
    entry_starts = view_vector(data, body, header["entry_starts"], "U64").astype(np.int64)
    ids = view_vector(data, body, header["entry_ids"], "U8")
    log_probs = view_vector(data, body, header["entry_log_probs"], kind)
    positions = position_starts(starts)
    if len(counts) != positions[-1] or len(entry_starts) != len(positions):
        raise ValueError(
            f"{len(counts)} entry_counts and {len(entry_starts)} entry_starts of {positions[-1]} "
            f"positions of {len(positions) - 1} documents"
        )
    _require_counts(counts, entry_starts, positions, rule)
    if (len(log_probs), len(ids)) != (entry_starts[-1], -(-entry_starts[-1] * rule.id_bits // 8)):
        raise ValueError(
            f"{len(log_probs)} entry_log_probs and {len(ids)} bytes of entry_ids, "
            f"{rule.id_bits} bits each, of {entry_starts[-1]} entries"
        )
    draws, num_draws = ids[:0], np.count_nonzero(counts) * rule.draws
    if rule.draws:
        draws = view_vector(data, body, header["draw_ids"], "U8")
    if len(draws) != -(-num_draws * rule.id_bits // 8):
        raise ValueError(
            f"{len(draws)} bytes of draw_ids, {rule.id_bits} bits each, of {num_draws}"
        )
    return ShardEntries(rule, counts, entry_starts, ids, log_probs, positions, draws)


def _require_counts(
    counts: NDArray[np.uint8],
    entry_starts: NDArray[np.int64],
    positions: NDArray[np.int64],
    rule: DistributionRule,
) -> None:
    found = np.append(0, np.cumsum(counts, dtype=np.int64))[positions]
    wrong = np.flatnonzero(found != entry_starts)
    if len(wrong):
        raise ValueError(
            f"document {max(0, wrong[0] - 1)}: entry_starts has {entry_starts[wrong[0]]}, but "
            f"entry_counts add up to {found[wrong[0]]}"
        )
    above = np.flatnonzero(counts > rule.top_k)
    if len(above):
        document = int(np.searchsorted(positions, above[0], "right")) - 1
        raise ValueError(
            f"document {document}: a position has {counts[above[0]]} entries, {rule.top_k} at most"
        )
