"""Check whether stored distributions are possible and reproducible."""

import numpy as np
from numpy.typing import NDArray

from pipeline.scoring.entries import fill_entries, require_sound
from schemas.distribution_rule import DistributionRule
from schemas.errors import DamagedShardError
from schemas.sidecar import ShardLosses
from schemas.stored_distributions import ShardEntries, largest_error


def contradicting_entries(
    losses: ShardLosses, rule: DistributionRule | None, *, at: str
) -> list[str]:
    """Return contradictions in a sidecar's entries, or to `rule`."""
    entries = losses.entries
    if (entries and entries.rule) != rule:
        return [f"it holds {entries and entries.rule}, its score manifest says {rule}"]
    try:
        if entries is not None:
            require_sound(entries, at=at)
    except DamagedShardError as error:
        return [str(error)]
    return []


def contradicting_places(
    entries: ShardEntries,
    has_loss: NDArray[np.bool_],
    starts: NDArray[np.int64],
    *,
    of_ends: bool,
) -> list[str]:
    """Report positions that lack entries, or have some without context.

    `has_loss`, bool [M], marks tokens with a context; `starts` is int64 [D + 1]. With `of_ends`,
    texts' ends have entries.
    """
    expected = np.full(len(entries.counts), of_ends)  # the place after a document has some
    document = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    own = np.arange(len(has_loss)) + (entries.position_starts - starts)[document]
    expected[own] = has_loss
    has_entries = entries.counts > 0
    is_free = expected if entries.rule.entropy_above else np.False_
    bad = np.flatnonzero((has_entries != expected) & ~is_free)
    if not len(bad):
        return []
    number = int(np.searchsorted(entries.position_starts, bad[0], "right")) - 1
    what = "has no entries" if expected[bad[0]] else "has entries without a context"
    place = bad[0] - entries.position_starts[number]
    return [f"position {place} of document {number} {what}, and {len(bad) - 1} more"]


def compare_entries(
    again: ShardEntries, stored: ShardEntries, documents: list[int], *, tolerance: float
) -> str:
    """Describe entries that differ beyond rounding and batching, or return "".

    A token's log-probabilities agree within rounding and `tolerance` (nats); a token of one side
    only is at most as likely as the other's last.
    """
    num_bad, num_entries, worst = 0, 0, 0.0
    num_lone, num_positions = 0, 0
    for document in documents:
        a, b = (_next_tokens_of(entries, document)[:2] for entries in (again, stored))
        num_lone += int(np.count_nonzero((a[0][:, 0] < 0) != (b[0][:, 0] < 0)))
        num_positions += len(a[0])
        for one, other in ((a, b), (b, a)):
            off = _differences(one, other, stored.rule)
            num_bad += int(np.count_nonzero(off > tolerance))
            num_entries += int(np.count_nonzero(one[0] >= 0))
            worst = max(worst, float(off.max(initial=0.0)))
    # If entropy decides which positions have entries, as many may differ as draws may.
    if num_lone > min(4 * tolerance, 0.5) * num_positions:
        return (
            f"{num_lone} of {num_positions} positions of {len(documents)} documents have entries "
            "only as stored or only when they are scored again: another teacher gave them, or they "
            "were altered; run vocag score again"
        )
    if not num_bad:
        return ""
    return (
        f"{num_bad} of {num_entries} entries of {len(documents)} documents differ when they are "
        f"scored again, by up to {worst:.3g} nats beyond their rounding: another teacher gave "
        "them, or they were altered; run vocag score again"
    )


def compare_draws(
    again: ShardEntries, stored: ShardEntries, documents: list[int], *, tolerance: float
) -> str:
    """Describe draws if more differ than batching explains, or return "".

    Log-probabilities off by `tolerance` (nats) change some; another seed or teacher nearly all.
    """
    pairs = [
        [_next_tokens_of(entries, document)[2] for entries in (again, stored)]
        for document in documents
    ]
    num_draws = sum(one.size for one, _ in pairs)
    num_others = sum(int(np.count_nonzero(one != other)) for one, other in pairs)
    # A draw chooses a block and a token, between two competitors each: four rounded values.
    if num_others <= min(4 * tolerance, 0.5) * num_draws:
        return ""
    return (
        f"{num_others} of {num_draws} draws of {len(documents)} documents, document "
        f"{next(n for n, (a, b) in zip(documents, pairs, strict=True) if (a != b).any())} first, "
        "are others when they are drawn again: another seed or teacher gave them, or they were "
        "altered; run vocag score again"
    )


def _next_tokens_of(
    entries: ShardEntries, document: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    start, stop = entries.position_starts[document : document + 2].tolist()
    top_k = entries.rule.top_k
    shape = stop - start, top_k + entries.rule.draws
    ids, log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    fill_entries(entries, document, 0, ids=ids, log_probs=log_probs, at="")
    return ids[:, :top_k], log_probs[:, :top_k], ids[:, top_k:]


def _differences(
    one: tuple[NDArray[np.int32], NDArray[np.float32]],
    other: tuple[NDArray[np.int32], NDArray[np.float32]],
    rule: DistributionRule,
) -> NDArray[np.float32]:
    """Return each entry's error beyond rounding, float32 [P, K]."""
    (ids, log_probs), (other_ids, others) = one, other
    found = np.full(ids.shape, np.float32(np.nan))
    for place in range(ids.shape[1]):
        same = ids == other_ids[:, place : place + 1]
        found = np.where(same, others[:, place : place + 1], found)
    # An entry that the other side lacks is at most as likely as its last one.
    counts = (other_ids >= 0).sum(axis=1)
    last = np.take_along_axis(others, np.maximum(counts - 1, 0)[:, None], axis=1)
    with np.errstate(invalid="ignore"):  # places without an entry
        off = np.where(np.isnan(found), log_probs - last, np.abs(log_probs - found))
        off = off - 2 * largest_error(log_probs, rule.log_probs)
    is_judged = (ids >= 0) & (counts > 0)[:, None]
    return np.where(is_judged, np.maximum(off, 0), 0).astype(np.float32)
