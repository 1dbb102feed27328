"""The teacher's distributions of labels: from the rows, or from a running teacher."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pipeline.distributions.mapping import map_batch
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.losses.divergences import LabelDistributions
from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.logits import OutputLayer
from pipeline.losses.tail import TailDraws, row_draw_keys
from pipeline.streaming import Rows
from pipeline.streaming.layout import DISTRIBUTION_FIELDS
from schemas.distribution_rule import EntryShape


def read_distributions(batch: Rows) -> LabelDistributions:
    """Return the rows' distributions; ValueError if they hold none."""
    if "next_token_ids" not in batch:
        raise ValueError(
            "rows hold no distributions: read them with StreamConfig("
            "teaching=Teaching(stored_losses=…), with_distributions=True) after `vocag score "
            "DATASET --teacher … --top-k 8`, or give a teacher and the vocabulary_map of both "
            "tokenizers"
        )
    ids, probs, own_ids = (batch[name] for name in DISTRIBUTION_FIELDS)
    return LabelDistributions(ids.long(), probs, own_ids.long(), batch.layout.entries)


@torch.no_grad()
def ask_distributions(
    states: Tensor, layer: OutputLayer, batch: Rows, tables: VocabularyMap, shape: EntryShape
) -> LabelDistributions:
    """Return a running teacher's distributions, in the form of rows but unrounded."""
    fields = batch.host or Rows(batch.buffer.cpu(), batch.layout)
    vocab_size = len(tables.tables.teacher_starts) - 1
    losses, ids, log_probs = ask_entries(states, layer, fields, shape, vocab_size=vocab_size)
    found = map_batch(fields, ids, log_probs, tables, losses, exact=shape.exact)
    mapped_ids, probs, own_ids = (torch.from_numpy(each).to(states.device) for each in found)
    return LabelDistributions(mapped_ids.long(), probs, own_ids.long(), shape)


@torch.no_grad()
def ask_entries(
    states: Tensor, layer: OutputLayer, rows: Rows, shape: EntryShape, *, vocab_size: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Return a running teacher's losses and entries for its own tokens, for `map_batch`.

    Rows are in host memory, states float [rows, T, H]. Draws equal those that `vocag score` stores
    with its default seed. Losses are nats, NaN if undefined.
    """
    tokens, has_loss = rows["teacher_input_ids"].long(), rows.teacher_has_loss
    # A place's own next token; a segment's last place has none.
    labels = pad(tokens[:, 1:].where(has_loss[:, 1:], -1), (0, 1), value=-1)
    keys = torch.zeros((tokens.numel(), 2), dtype=torch.int64, device=states.device)
    if shape.drawn:
        own = row_draw_keys(rows["teacher_input_ids"], rows["teacher_cu_seqlens"])
        keys = own.flatten(0, 1).to(states.device)
    tail = TailDraws(keys, shape.drawn)
    ahead, ids, log_probs = score_with_likeliest(
        states.flatten(0, 1),
        layer,
        labels.flatten().to(states.device),
        shape.exact - 1,
        vocab_size=vocab_size,
        tail=tail,
    )
    losses = pad(ahead.view(tokens.shape)[:, :-1], (1, 0)).float().cpu()
    ids, log_probs = tail.behind(ids, log_probs)
    shown = (*tokens.shape, -1)
    return (
        losses.masked_fill(~has_loss, torch.nan).numpy(),
        ids.view(shown).int().cpu().numpy(),
        log_probs.view(shown).float().cpu().numpy(),
    )
