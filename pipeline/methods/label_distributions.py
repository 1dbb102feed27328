"""What a teacher expects in place of each label: read with the rows, or from a running teacher."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.distributions.mapping import map_batch
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.guidance.draws import TailDraws, draw_keys
from pipeline.guidance.likeliest import likeliest_tokens, score_with_likeliest
from pipeline.guidance.output_layer import OutputLayer
from pipeline.streaming import Rows


@dataclass(frozen=True)
class LabelDistributions:
    """Distributions of the labels of a batch, over the student's vocabulary.

    Attributes:
        ids: int64 [rows, seq_length, K], by falling mass; -1 behind the last, and alone if a
            label has no distribution.
        probs: float32 [rows, seq_length, K], their mass; what they leave of 1 is the residual.
        draws: how many of the K, the last, are draws: each -1 or a token, in any order.
    """

    ids: Tensor
    probs: Tensor
    draws: int = 0


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
    ids, probs = batch["next_token_ids"].long(), batch["next_token_probs"]
    return LabelDistributions(ids, probs, batch.layout.draws)


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

    Args:
        states: float [rows, teacher_seq_length, H], the teacher's hidden states of its tokens.
        layer: the teacher's output layer.
        batch: the same rows.
        tables: of their two tokenizers.
        top_k: entries of each.
        draws: of the rest, as `vocag score --draws` stores them, by its default seed.
    """
    vocab_size, losses = len(tables.tables.teacher_starts) - 1, None
    fields = Rows(batch.buffer.cpu(), batch.layout)
    if draws:
        losses, ids, log_probs = _with_draws(states, layer, fields, (top_k, draws), vocab_size)
    else:
        ids, log_probs = likeliest_tokens(states, layer, top_k, vocab_size=vocab_size)
    found = map_batch(
        fields,
        ids.cpu().numpy().astype(np.int32),
        log_probs.float().cpu().numpy(),
        tables,
        losses=None if losses is None else losses.float().cpu().numpy(),
        draws=draws,
    )
    mapped_ids, probs = (torch.from_numpy(each).to(states.device) for each in found)
    return LabelDistributions(mapped_ids.long(), probs, draws)


def _with_draws(
    states: Tensor, layer: OutputLayer, rows: Rows, sizes: tuple[int, int], vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [rows, T], ids and log-probabilities [rows, T, K + 1 + draws] for `map_batch`.

    What is drawn is what `vocag score` draws: its pieces of documents are the rows' segments.
    """
    (top_k, draws), tokens = sizes, rows["teacher_input_ids"]
    keys = np.zeros((*tokens.shape, 2), np.int64)
    for row, bounds in enumerate(rows["teacher_cu_seqlens"].tolist()):
        for start, stop in pairwise(bounds):
            if stop > start:
                keys[row, start:stop] = draw_keys(tokens[row, start:stop].numpy(), seed=0)
    # A place's own next token; a segment's last place has none.
    labels = torch.full(tokens.shape, -1)
    labels[:, :-1] = tokens[:, 1:].long().where(rows.teacher_has_loss[:, 1:], -1)
    tail = TailDraws(torch.from_numpy(keys).flatten(0, 1).to(states.device), draws)
    ahead, ids, log_probs = score_with_likeliest(
        states.flatten(0, 1),
        layer,
        labels.flatten().to(states.device),
        top_k,
        vocab_size=vocab_size,
        tail=tail,
    )
    losses = ahead.new_full(tokens.shape, torch.nan)
    losses[:, 1:] = ahead.view(tokens.shape)[:, :-1]
    losses = losses.masked_fill(~rows.teacher_has_loss.to(losses.device), torch.nan)
    ids = torch.cat([ids, ids.new_full((len(ids), 1), -1), tail.ids], -1)
    log_probs = pad(log_probs, (0, 1 + draws), value=-torch.inf)
    return losses, ids.view(*tokens.shape, -1), log_probs.view(*tokens.shape, -1)
