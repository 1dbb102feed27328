"""Stored distributions back as arrays: each entry is checked when it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled
from schemas.distribution_rule import DistributionRule
from schemas.distributions import LARGEST_MASS, ShardEntries, TopTokens, stored_values
from schemas.errors import DamagedShardError

_ID, _ORDER, _MASS, _TWICE = 1, 2, 3, 4
_BLOCK = 1 << 14  # positions checked at once


def fill_entries(
    entries: ShardEntries,
    document: int,
    start: int,
    *,
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    at: str,
) -> None:
    """Fill in the entries of some positions of a document.

    Args:
        entries: of its shard.
        document: its number in the shard.
        start: the first position; it has all that are asked for.
        ids: int32 [n, K], gets token ids, -1 if a position has no more entries; K is the rule's.
        log_probs: float32 [n, K], gets nats, falling, -inf if there is none.
        at: the sidecar's path, for errors.

    Raises:
        DamagedShardError: they are none that a teacher gives.

    Example:
        >>> fill_entries(shard.entries, 7, 0, ids=ids, log_probs=log_probs, at=path)
    """
    own = int(entries.position_starts[document])
    counts = entries.counts[own : own + start + len(ids)]
    rule, codes = entries.rule, entries.log_probs
    bad, kind = _fill(
        counts=counts[start:],
        entry=int(entries.starts[document] + counts[:start].sum(dtype=np.int64)),
        packed=entries.ids,
        codes=codes if codes.dtype == np.uint8 else codes.view(np.uint16),
        sizes=(rule.id_bits, rule.vocab_size),
        values=stored_values(rule.log_probs),
        ids=ids,
        log_probs=log_probs,
    )
    if bad < len(ids):
        raise _damaged(kind, rule, document, start + bad, at)


def fill_draws(
    entries: ShardEntries,
    document: int,
    start: int,
    *,
    ids: NDArray[np.int32],
    draws: NDArray[np.int32],
    at: str,
) -> None:
    """Fill in what was drawn at the same positions.

    Args:
        entries: of its shard.
        document: its number in the shard.
        start: the first position.
        ids: int32 [n, K or more], as `fill_entries` has filled them.
        draws: int32 [n, draws], gets token ids, -1 if a position has no entries.
        at: the sidecar's path, for errors.

    Raises:
        DamagedShardError: an id is none, or one of the position's entries.

    Example:
        >>> fill_draws(shard.entries, 7, 0, ids=ids, draws=draws, at=path)
    """
    rule = entries.rule
    bad, kind = _fill_draws(
        first=(int(entries.position_starts[document]) + start) * rule.draws,
        packed=entries.draw_ids,
        sizes=(rule.id_bits, rule.vocab_size, rule.top_k),
        ids=ids,
        draws=draws,
    )
    if bad < len(ids):
        raise _damaged(kind, rule, document, start + bad, at)


def copy_entries(
    entries: ShardEntries, document: int, top: TopTokens, positions: slice, *, at: str
) -> None:
    """Copy a document's entries to its positions in another shard, as they are stored.

    Args:
        entries: of its shard.
        document: its number there.
        top: of the other shard, by the same rule.
        positions: of the document there.
        at: the sidecar's path, for errors.

    Raises:
        DamagedShardError: they are none that a teacher gives.
    """
    ids = top.ids[positions]
    log_probs = np.empty(ids.shape, np.float32)
    fill_entries(entries, document, 0, ids=ids, log_probs=log_probs, at=at)
    own = slice(*entries.starts[document : document + 2].tolist())
    top.log_probs[positions][ids >= 0] = entries.log_probs[own]
    if entries.rule.draws:
        draws = top.draws[positions]
        fill_draws(entries, document, 0, ids=ids, draws=draws, at=at)
        draws[draws < 0] = 0


def require_sound(entries: ShardEntries, *, at: str) -> None:
    """Check every entry of a shard, and that no position has a token twice.

    Raises:
        DamagedShardError: some are none that a teacher gives.
    """
    shape = _BLOCK, entries.rule.top_k
    ids, log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    draws = np.empty((_BLOCK, entries.rule.draws), np.int32)
    for document, count in enumerate(np.diff(entries.position_starts).tolist()):
        for start in range(0, count, _BLOCK):
            own = ids[: count - start]
            fill_entries(entries, document, start, ids=own, log_probs=log_probs[: len(own)], at=at)
            if entries.rule.draws:
                fill_draws(entries, document, start, ids=own, draws=draws[: len(own)], at=at)
            own.sort(axis=1)
            twice = ((own[:, 1:] == own[:, :-1]) & (own[:, 1:] >= 0)).any(axis=1)
            if twice.any():
                raise DamagedShardError(
                    f"{at}: position {start + int(twice.argmax())} of document {document} has "
                    "a token twice: it was altered; delete it and run vocag score again"
                )


def _damaged(
    kind: int, rule: DistributionRule, document: int, position: int, at: str
) -> DamagedShardError:
    what = {
        _ID: f"a token id beyond the vocabulary of {rule.vocab_size}",
        _ORDER: "a log-probability that rises or isn't a number of at most 0",
        _MASS: "probabilities that add up to more than 1",
        _TWICE: "drawn a token that is one of its entries",
    }[kind]
    return DamagedShardError(
        f"{at}: position {position} of document {document} has {what}: it was altered; "
        "delete it and run vocag score again"
    )


@compiled
def _token_at(packed: NDArray[np.uint8], number: int, num_bits: int) -> np.int64:
    bit = np.int64(number) * num_bits
    token = np.int64(0)
    for byte in range((bit + num_bits - 1) >> 3, (bit >> 3) - 1, -1):
        token = (token << 8) | packed[byte]
    return (token >> (bit & 7)) & ((np.int64(1) << num_bits) - 1)


@compiled
def _fill_draws(
    first: int,
    packed: NDArray[np.uint8],
    sizes: tuple[int, int, int],
    ids: NDArray[np.int32],
    draws: NDArray[np.int32],
) -> tuple[int, int]:
    """Unpack positions' draws from number `first` on; return the first bad one, and its fault."""
    num_bits, vocab_size, top_k = sizes
    for row in range(len(draws)):
        for place in range(draws.shape[1]):
            if ids[row, 0] < 0:
                draws[row, place] = -1
                continue
            token = _token_at(packed, first + row * draws.shape[1] + place, num_bits)
            if token >= vocab_size:
                return row, _ID
            is_entry = False
            for entry in range(top_k):
                is_entry |= ids[row, entry] == token
            if is_entry:
                return row, _TWICE
            draws[row, place] = token
    return len(draws), 0


@compiled
def _fill(
    counts: NDArray[np.uint8],
    entry: int,
    packed: NDArray[np.uint8],
    codes: NDArray[Any],
    sizes: tuple[int, int],
    values: tuple[NDArray[np.float32], NDArray[np.float64]],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
) -> tuple[int, int]:
    """Unpack positions' entries from number `entry` on; return the first bad one, and its fault."""
    num_bits, vocab_size = sizes
    nats, least = values
    for row in range(len(counts)):
        mass, last = 0.0, np.float32(0.0)
        for place in range(counts[row]):
            token = _token_at(packed, entry, num_bits)
            value = nats[codes[entry]]
            if token >= vocab_size:
                return row, _ID
            if not value <= last:
                return row, _ORDER
            mass += least[codes[entry]]
            if mass > LARGEST_MASS:
                return row, _MASS
            ids[row, place], log_probs[row, place] = token, value
            last = value
            entry += 1
        for place in range(counts[row], ids.shape[1]):
            ids[row, place], log_probs[row, place] = -1, -np.inf
    return len(counts), 0
