"""Stored distributions back as arrays: each entry is checked when it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled
from schemas.distributions import LARGEST_MASS, ShardEntries, TopTokens, stored_values
from schemas.errors import DamagedShardError

_ID, _ORDER, _MASS = 1, 2, 3
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
        what = {
            _ID: f"a token id beyond the vocabulary of {rule.vocab_size}",
            _ORDER: "a log-probability that rises or isn't a number of at most 0",
            _MASS: "probabilities that add up to more than 1",
        }[kind]
        raise DamagedShardError(
            f"{at}: position {start + bad} of document {document} has {what}: it was altered; "
            "delete it and run vocag score again"
        )


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


def require_sound(entries: ShardEntries, *, at: str) -> None:
    """Check every entry of a shard, and that no position has a token twice.

    Raises:
        DamagedShardError: some are none that a teacher gives.
    """
    shape = _BLOCK, entries.rule.top_k
    ids, log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    for document, count in enumerate(np.diff(entries.position_starts).tolist()):
        for start in range(0, count, _BLOCK):
            own = ids[: count - start]
            fill_entries(entries, document, start, ids=own, log_probs=log_probs[: len(own)], at=at)
            own.sort(axis=1)
            twice = ((own[:, 1:] == own[:, :-1]) & (own[:, 1:] >= 0)).any(axis=1)
            if twice.any():
                raise DamagedShardError(
                    f"{at}: position {start + int(twice.argmax())} of document {document} has "
                    "a token twice: it was altered; delete it and run vocag score again"
                )


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
    mask = (np.int64(1) << num_bits) - 1
    for row in range(len(counts)):
        mass, last = 0.0, np.float32(0.0)
        for place in range(counts[row]):
            bit = np.int64(entry) * num_bits
            token = np.int64(0)
            for byte in range((bit + num_bits - 1) >> 3, (bit >> 3) - 1, -1):
                token = (token << 8) | packed[byte]
            token = (token >> (bit & 7)) & mask
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
