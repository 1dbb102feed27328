"""What a run on a mixture tells of each of its datasets: tokens, epochs and loss."""

import torch
from torch import Tensor

from pipeline.streaming import AlignedRows, Rows


@torch.no_grad()
def losses_by_source(losses: Tensor, batch: Rows) -> dict[str, Tensor]:
    """Return the student's loss in each dataset of a mixture, over all labels, kept or not.

    Args:
        losses: float [rows, seq_length], nats.
        batch: of the same rows.

    Returns:
        `student_loss/NAME` for each, as metrics of `pipeline.guidance.LossResult`; nothing where
        rows are of one dataset.
    """
    names = batch.layout.sources
    if not names:
        return {}
    counted = batch["loss_mask"].bool()
    sums = torch.where(counted, losses, 0.0).double().sum(-1)
    pairs = torch.stack((sums, counted.sum(-1).double()), -1)
    by_source = pairs.new_zeros(len(names), 2).index_add_(0, batch["source"].long(), pairs)
    return {f"student_loss/{name}": each for name, each in zip(names, by_source, strict=True)}


def read_so_far(rows: AlignedRows, consumed_samples: int) -> dict[str, float]:
    """Return how much of each dataset of a mixture a run has read.

    Args:
        rows: of the run.
        consumed_samples: rows that it has read.

    Returns:
        `tokens/NAME`, student tokens by the dataset's mean row, and `epochs/NAME`; nothing where
        rows are of one dataset.

    Example:
        >>> read_so_far(rows, 96)
        {'tokens/web': 131072, 'epochs/web': 0.25, 'tokens/math': 65536, 'epochs/math': 1.5}
    """
    told: dict[str, float] = {}
    if not rows.layout.sources:
        return told
    counts = rows.plan.counts_before(consumed_samples)
    tokens = rows.plan.tokens_before(consumed_samples)
    for source, count, num_tokens in zip(rows.plan.sources, counts, tokens, strict=True):
        told[f"tokens/{source.name}"] = num_tokens
        told[f"epochs/{source.name}"] = count / source.num_rows
    return told
