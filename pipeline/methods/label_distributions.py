"""What a teacher expects in place of each label: read with the rows, or from a running teacher."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pipeline.distributions.mapping import map_batch
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.guidance.draws import TailDraws, row_draw_keys
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
        draws: how many of the K, the last, are draws: each -1 or a token, in any order.
    """

    ids: Tensor
    probs: Tensor
    moved: Tensor
    draws: int = 0


def read_distributions(batch: Rows) -> LabelDistributions:
    """Return the distributions that rows hold, or raise ValueError."""
    if "next_token_ids" not in batch:
        raise ValueError(
            "rows hold no distributions: read them with StreamConfig("
            "teaching=Teaching(stored_losses=…), with_distributions=True) after `vocag score "
            "DATASET --teacher … --top-k 16`, or give a teacher and the vocabulary_map of both "
            "tokenizers"
        )
    ids, probs, moved = (batch[name] for name in DISTRIBUTION_FIELDS)
    return LabelDistributions(ids.long(), probs, moved, batch.layout.draws)


@torch.no_grad()
def ask_distributions(
    states: Tensor,
    layer: OutputLayer,
    batch: Rows,
    tables: VocabularyMap,
    top_k: int,
    draws: int = 0,
) -> LabelDistributions:
    """Return the distributions of a running teacher, as rows would hold them unrounded.

    `states` are those of its own tokens, float [rows, teacher_seq_length, H]. Of the rest, `draws`
    are taken as `vocag score --draws` stores them, by its default seed.
    """
    fields = batch.host or Rows(batch.buffer.cpu(), batch.layout)
    vocab_size = len(tables.tables.teacher_starts) - 1
    losses, ids, log_probs = ask_entries(
        states, layer, fields, top_k=top_k, draws=draws, vocab_size=vocab_size
    )
    found = map_batch(fields, ids, log_probs, tables, losses, draws=draws)
    mapped_ids, probs, moved = (torch.from_numpy(each).to(states.device) for each in found)
    return LabelDistributions(mapped_ids.long(), probs, moved, draws)


@torch.no_grad()
def ask_entries(
    states: Tensor, layer: OutputLayer, rows: Rows, *, top_k: int, draws: int, vocab_size: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Return what a running teacher says of its own tokens, as `map_batch` takes it.

    States are float [rows, T, H]; rows are in this machine's memory; the teacher's tokenizer has
    `vocab_size` tokens. What is drawn is what `vocag score` draws: its pieces of documents are the
    rows' segments.

    Returns losses, float32 [rows, T], nats, NaN where there is none; ids and log-probabilities
    [rows, T, K], with draws [rows, T, K + 1 + draws].
    """
    tokens, has_loss = rows["teacher_input_ids"].long(), rows.teacher_has_loss
    # A place's own next token; a segment's last place has none.
    labels = pad(tokens[:, 1:].where(has_loss[:, 1:], -1), (0, 1), value=-1)
    tail = None
    if draws:
        keys = row_draw_keys(rows["teacher_input_ids"], rows["teacher_cu_seqlens"])
        tail = TailDraws(keys.flatten(0, 1).to(states.device), draws)
    ahead, ids, log_probs = score_with_likeliest(
        states.flatten(0, 1),
        layer,
        labels.flatten().to(states.device),
        top_k,
        vocab_size=vocab_size,
        tail=tail,
    )
    losses = pad(ahead.view(tokens.shape)[:, :-1], (1, 0)).float().cpu()
    if tail is not None:
        ids, log_probs = tail.behind(ids, log_probs)
    shape = (*tokens.shape, -1)
    return (
        losses.masked_fill(~has_loss, torch.nan).numpy(),
        ids.view(shape).int().cpu().numpy(),
        log_probs.view(shape).float().cpu().numpy(),
    )
