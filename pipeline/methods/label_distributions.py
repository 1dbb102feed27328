"""What a teacher expects in place of each label: read with the rows, or from a running teacher."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.distributions.mapping import map_batch
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.guidance.likeliest import score_with_likeliest
from pipeline.guidance.output_layer import OutputLayer
from pipeline.streaming import Rows
from pipeline.streaming.layout import DISTRIBUTION_FIELDS


@dataclass(frozen=True)
class LabelDistributions:
    """Distributions of the labels of a batch, over the student's vocabulary.

    Attributes:
        ids: int64 [rows, seq_length, K], by falling mass; -1 behind the last, and alone if a
            label has no distribution.
        probs: float32 [rows, seq_length, K], their mass; what they leave of 1 is the residual.
        moved: float32 [rows, seq_length], `moved_mass` of the rows.
    """

    ids: Tensor
    probs: Tensor
    moved: Tensor


def read_distributions(batch: Rows) -> LabelDistributions:
    """Return the distributions that rows hold.

    Raises:
        ValueError: they hold none.
    """
    if "next_token_ids" not in batch:
        raise ValueError(
            "rows hold no distributions: read them with StreamConfig("
            "teaching=Teaching(stored_losses=…), with_distributions=True) after `vocag score "
            "DATASET --teacher … --top-k 16`, or give a teacher and the vocabulary_map of both "
            "tokenizers"
        )
    ids, probs, moved = (batch[name] for name in DISTRIBUTION_FIELDS)
    return LabelDistributions(ids.long(), probs, moved)


@torch.no_grad()
def ask_distributions(
    states: Tensor, layer: OutputLayer, batch: Rows, tables: VocabularyMap, top_k: int
) -> LabelDistributions:
    """Return the distributions of a running teacher, as rows would hold them unrounded.

    Args:
        states: float [rows, teacher_seq_length, H], the teacher's hidden states of its tokens.
        layer: the teacher's output layer.
        batch: the same rows.
        tables: of their two tokenizers.
        top_k: entries of each.
    """
    vocab_size = len(tables.tables.teacher_starts) - 1
    following = batch["teacher_input_ids"].long().roll(-1, 1)
    scored = score_with_likeliest(
        states.flatten(0, 1), layer, following.flatten(), top_k, vocab_size=vocab_size
    )
    losses, ids, log_probs = (each.unflatten(0, following.shape).cpu() for each in scored)
    fields = Rows(batch.buffer.cpu(), batch.layout)
    losses = losses.roll(1, 1).masked_fill(~fields.teacher_has_loss, torch.nan)
    found = map_batch(
        fields,
        ids.numpy().astype(np.int32),
        log_probs.float().numpy(),
        tables,
        losses.float().numpy(),
    )
    mapped_ids, *others = (torch.from_numpy(each).to(states.device) for each in found)
    return LabelDistributions(mapped_ids.long(), *others)
