"""Compare two teachers' stored losses of one dataset, token by token.

Students' losses aren't stored, so tokens are ranked as if those were constant: within a shard, by
the teacher's largest loss over a student token's span. Real ones spread the ranking further.
"""

from dataclasses import dataclass
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.files import Dataset, open_dataset
from pipeline.dataset.score_files import ScoreFiles, find_scores, read_sidecar, scores_of
from pipeline.fractions import floor_of_fraction
from schemas.document import decode_document
from schemas.errors import ForeignLossesError
from schemas.index import ShardIndex
from schemas.sidecar import ShardLosses

KEPT = 0.4
"""Share of the mapped tokens that is kept, the paper's."""


@dataclass
class Comparison:
    """Differences between two teachers' losses, B minus A, in nats.

    Both have losses of `num_tokens` tokens. Each would keep `num_kept` student tokens;
    `num_changed` of A's are not among B's.
    """

    num_tokens: int = 0
    mean: float = 0.0
    mean_absolute: float = 0.0
    largest: float = 0.0
    num_kept: int = 0
    num_changed: int = 0


def compare_scores(location: str, first: str, second: str) -> Comparison:
    """Compare two scores of a dataset, named as in `find_scores`, without removed documents.

    ForeignLossesError if their contexts or documents differ.
    """
    dataset = open_dataset(location)

    def find(name: str) -> ScoreFiles:
        found = find_scores(
            name, dataset.location, choose=lambda one: f"{one}  # in place of {quote(name)}"
        )
        return scores_of(found, dataset)

    scores = [find(first), find(second)]
    _require_comparable(scores)
    found, total, absolute = Comparison(), 0.0, 0.0
    for number in range(len(dataset.manifest.shards)):
        index = dataset.read_index(number, with_names=True)
        shard = dataset.manifest.shards[number]
        a, b = (read_sidecar(one, one.manifest.sidecars[number], shard) for one in scores)
        is_read = np.ones(len(index), np.bool_)
        is_read[dataset.removed_of(number)] = False
        difference = b.losses.astype(np.float64) - a.losses
        difference = difference[~np.isnan(difference) & np.repeat(is_read, np.diff(a.starts))]
        sizes = np.abs(difference)
        found.num_tokens += len(difference)
        total += float(difference.sum())
        absolute += float(sizes.sum())
        found.largest = max(found.largest, float(sizes.max(initial=0.0)))
        kept, changed = _count_kept(dataset, number, index, a, b)
        found.num_kept += kept
        found.num_changed += changed
    found.mean = total / max(1, found.num_tokens)
    found.mean_absolute = absolute / max(1, found.num_tokens)
    return found


def kept_tokens(guidance: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which tokens a student with constant loss would keep, [T].

    `guidance` is NaN for unmapped tokens. The number kept is rounded down; of equal tokens the
    earlier is kept.
    """
    kept = np.zeros(len(guidance), np.bool_)
    num_kept = floor_of_fraction(int(np.count_nonzero(~np.isnan(guidance))), KEPT)
    kept[np.argsort(guidance, kind="stable")[:num_kept]] = True
    return kept


def _require_comparable(scores: list[ScoreFiles]) -> None:
    a, b = (one.manifest.rule for one in scores)
    if a.fingerprint == b.fingerprint:
        raise ForeignLossesError(f"{scores[0].path} is named twice: name two teachers' scores")
    if a.context != b.context:
        raise ForeignLossesError(
            f"{scores[0].path} and {scores[1].path} were scored in different contexts "
            f"({a.context}, {b.context}): score again with the same lengths and --teacher-context"
        )
    if a.where != b.where:
        raise ForeignLossesError(
            f"{scores[0].path} and {scores[1].path} hold losses of different documents (where "
            f"{a.where or 'true'}, where {b.where or 'true'}): score again with the same --where"
        )


def _count_kept(
    dataset: Dataset, number: int, index: ShardIndex, a: ShardLosses, b: ShardLosses
) -> tuple[int, int]:
    """Count a shard's student tokens that A keeps, and those of them that B doesn't."""
    scored = np.flatnonzero(np.diff(a.starts)).tolist()
    # As ranges of the shard's losses.
    parts = [
        decode_document(sample).teacher_spans + a.starts[document]
        for document, sample in dataset.samples(number, index, documents=scored)
    ]
    if not parts:
        return 0, 0
    spans = np.concatenate(parts)
    # One may hold the learned tokens of chats alone: both rank what both know.
    is_known = ~(np.isnan(a.losses) | np.isnan(b.losses))
    losses = (np.where(is_known, one.losses.astype(np.float64), np.nan) for one in (a, b))
    kept = [kept_tokens(_largest(each, spans)) for each in losses]
    return int(kept[0].sum()), int(np.count_nonzero(kept[0] & ~kept[1]))


def _largest(losses: NDArray[np.float64], spans: NDArray[np.int64]) -> NDArray[np.float64]:
    # One more, so a span may end where the losses do.
    padded = np.append(np.where(np.isnan(losses), -np.inf, losses), -np.inf)
    largest = np.maximum.reduceat(padded, spans.ravel())[::2] if len(spans) else np.empty(0)
    return np.where((spans[:, 0] < spans[:, 1]) & (largest > -np.inf), largest, np.nan)
