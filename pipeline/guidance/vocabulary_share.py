"""An output layer whose rows several ranks share: which are this rank's, and sums over all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShare:
    """This rank's part of the vocabulary.

    Attributes:
        vocab_size: tokens of all ranks.
        first: the first of this rank's tokens.
        num_own: its tokens; 0 if the rank has nothing but padding.
        group: ranks that share the vocabulary; None: this process has all of it.
    """

    vocab_size: int
    first: int
    num_own: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, num_rows: int, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> VocabularyShare:
        """Return the share of a rank of the group, each of which has `num_rows` rows, in order.

        Args:
            num_rows: of this rank's output layer.
            vocab_size: rows of all ranks that are tokens; None: all rows.
            group: None: one process.

        Raises:
            ValueError: the ranks have fewer rows than the vocabulary tokens.

        Example:
            >>> VocabularyShare.of(512, 500, None)
            VocabularyShare(vocab_size=500, first=0, num_own=500, group=None)
        """
        ranks = 1 if group is None else group.size()
        vocab_size = num_rows * ranks if vocab_size is None else vocab_size
        if not 1 <= vocab_size <= num_rows * ranks:
            raise ValueError(
                f"vocab_size {vocab_size} must lie in 1..{num_rows * ranks}, the rows of the "
                "output layer's weight"
            )
        if group is None or ranks == 1:
            return cls(vocab_size, 0, vocab_size)
        first = group.rank() * num_rows
        return cls(vocab_size, first, min(max(vocab_size - first, 0), num_rows), group)

    def own_ids(self, token_ids: Tensor) -> Tensor:
        """Return the rows of this rank's layer for tokens, int64 [...]; -1 for other ranks'."""
        if self.group is None:
            return token_ids
        own = token_ids - self.first
        return own.where((own >= 0) & (own < self.num_own), -1)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(own, group=self.group)
        return own

    def maximum(self, own: Tensor) -> Tensor:
        """Return the largest over the ranks."""
        if self.group is None:
            return own
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def gather(self, own: Tensor) -> Tensor:
        """Return all ranks' columns [n, ranks * K], in order, of this rank's [n, K]."""
        if self.group is None:
            return own
        ranks = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(ranks, own.contiguous(), group=self.group)
        return torch.cat(ranks, -1)
