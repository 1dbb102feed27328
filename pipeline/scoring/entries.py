"""Stored distributions as arrays, each entry checked."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compiled import compiled
from schemas.distribution_rule import DistributionRule
from schemas.errors import DamagedShardError
from schemas.stored_distributions import LARGEST_MASS, ShardEntries, TopTokens, stored_values

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
    """Fill in a document's entries and draws, from position `start` on.

    `ids`, [n, K + draws or more], gets token ids, entries first and draws last, -1 if missing;
    `log_probs` gets falling nats, -inf for draws and missing entries. DamagedShardError for
    impossible entries of the sidecar `at`.
    """
    own = int(entries.position_starts[document])
    rule, codes = entries.rule, entries.log_probs
    bad, kind = _fill(
        counts=entries.counts[own : own + start + len(ids)],
        start=start,
        entry=int(entries.starts[document]),
        packed=entries.ids,
        codes=codes if codes.dtype == np.uint8 else codes.view(np.uint16),
        draw=int(entries.first_draws[document]),
        drawn=entries.draw_ids,
        sizes=(rule.id_bits, rule.vocab_size, rule.draws),
        values=stored_values(rule.log_probs),
        ids=ids,
        log_probs=log_probs,
    )
    if bad < len(ids):
        raise _damaged(kind, rule, document, start + bad, at)


def copy_entries(
    entries: ShardEntries, document: int, top: TopTokens, positions: slice, *, at: str
) -> None:
    """Copy a document's entries to its positions in `top`; errors as in `fill_entries`."""
    rule = entries.rule
    ids = np.empty((positions.stop - positions.start, rule.top_k + rule.draws), np.int32)
    fill_entries(entries, document, 0, ids=ids, log_probs=np.empty(ids.shape, np.float32), at=at)
    top.ids[positions], top.draws[positions] = np.split(ids, [rule.top_k], axis=1)
    own = slice(*entries.starts[document : document + 2].tolist())
    top.log_probs[positions][top.ids[positions] >= 0] = entries.log_probs[own]


def require_sound(entries: ShardEntries, *, at: str) -> None:
    """Check a shard's entries, also for repeated tokens; else DamagedShardError."""
    top_k = entries.rule.top_k
    shape = _BLOCK, top_k + entries.rule.draws
    ids, log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    for document, count in enumerate(np.diff(entries.position_starts).tolist()):
        for start in range(0, count, _BLOCK):
            own, values = ids[: count - start], log_probs[: count - start]
            fill_entries(entries, document, start, ids=own, log_probs=values, at=at)
            own = np.sort(own[:, :top_k], axis=1)
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
def _fill(
    counts: NDArray[np.uint8],
    start: int,
    entry: int,
    packed: NDArray[np.uint8],
    codes: NDArray[Any],
    draw: int,
    drawn: NDArray[np.uint8],
    sizes: tuple[int, int, int],
    values: tuple[NDArray[np.float32], NDArray[np.float64]],
    ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
) -> tuple[int, int]:
    """Unpack next tokens; return the first bad position's place, and why."""
    num_bits, vocab_size, draws = sizes
    nats, least = values
    width = ids.shape[1]
    for before in range(start):
        entry += counts[before]
        draw += draws if counts[before] else 0
    for row in range(len(ids)):
        count, mass, last = counts[start + row], 0.0, np.float32(0.0)
        for place in range(count):
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
        for place in range(count, width):
            ids[row, place], log_probs[row, place] = -1, -np.inf
        for place in range(width - draws, width if count else 0):
            token = _token_at(drawn, draw, num_bits)
            draw += 1
            if token >= vocab_size:
                return row, _ID
            for entry_place in range(count):
                if ids[row, entry_place] == token:
                    return row, _TWICE
            ids[row, place] = token
    return len(ids), 0
