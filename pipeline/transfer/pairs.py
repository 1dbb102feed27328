"""Which tokens of two vocabularies cover the same text, and how often."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.batches import AlignedBatch


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """How often tokens of two vocabularies cover the same text.

    Attributes:
        new_ids: int64 [P].
        old_ids: int64 [P].
        weights: float64 [P]; a new token's occurrence counts once, shared by the old tokens that
            cover it.
    """

    new_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    old_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def joined(self, other: "TokenPairs") -> "TokenPairs":
        """Return the pairs of both, each once."""
        return _each_once(
            np.concatenate((self.new_ids, other.new_ids)),
            np.concatenate((self.old_ids, other.old_ids)),
            np.concatenate((self.weights, other.weights)),
        )


def count_pairs(batches: Iterable[AlignedBatch]) -> TokenPairs:
    """Count which old tokens cover each new one in a text.

    Args:
        batches: `align_batch(documents, new_tokenizer, old_tokenizer)`: the new vocabulary is the
            student's, the old one the teacher's.
    """
    pairs = TokenPairs()
    for batch in batches:
        spans = batch.teacher_spans.astype(np.int64)
        widths = spans[:, 1] - spans[:, 0]
        document = np.repeat(
            np.arange(batch.student.num_documents), np.diff(batch.student.cu_tokens)
        )
        first = batch.teacher.cu_tokens[document] + spans[:, 0]
        # Every token of every span: its span's first place, and how far behind it.
        behind = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
        old = batch.teacher.input_ids[np.repeat(first, widths) + behind].astype(np.int64)
        new = np.repeat(batch.student.input_ids.astype(np.int64), widths)
        pairs = pairs.joined(_each_once(new, old, np.repeat(1 / np.maximum(widths, 1), widths)))
    return pairs


def _each_once(
    new_ids: NDArray[np.int64], old_ids: NDArray[np.int64], weights: NDArray[np.float64]
) -> TokenPairs:
    """Add up the weights of equal pairs."""
    width = int(old_ids.max(initial=0)) + 1
    keys, place = np.unique(new_ids * width + old_ids, return_inverse=True)
    totals = np.bincount(place, weights, len(keys)).astype(np.float64)
    return TokenPairs(keys // width, keys % width, totals)
