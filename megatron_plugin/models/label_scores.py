"""Losses from last hidden states, without logits of the whole vocabulary.

Dimensions: o places of a row that tensor-parallel ranks hold together, b rows, h hidden size, k
chosen tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_plugin.upstream import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from pipeline.losses.cell_sums import Cells
from pipeline.losses.cross_entropy import TokenScores, linear_cross_entropy
from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.logits import OutputLayer, VocabularyShare
from pipeline.losses.tail import TailDraws


def score_labels(
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels_ob: Tensor,
    *,
    vocab_size: int,
    loss_mask_ob: Tensor | None = None,
    with_entropy: bool = False,
    entry_ids_obk: Tensor | None = None,
    cells: Cells | None = None,
) -> TokenScores:
    """Return scores of labels, fp32 [o, b], as an output processor of GPTModel.

    Hidden states are [o, b, h], or [o / ranks, b, h] if tensor-parallel ranks share them;
    `output_weight` is for a layer without its own. `vocab_size` excludes the embedding's padding.
    Other arguments are as in `linear_cross_entropy`. All ranks get the same; labels outside the
    vocabulary get NaN.
    """

    def score(hidden: Tensor, weight: Tensor) -> TokenScores:
        return linear_cross_entropy(
            hidden,
            weight,
            labels_ob,
            loss_mask=loss_mask_ob,
            vocab_size=vocab_size,
            with_entropy=with_entropy,
            entry_ids=entry_ids_obk,
            cells=cells,
            group=parallel_state.get_tensor_model_parallel_group(),
            check_labels=False,
        )

    return _with_hooks(hidden_states, output_layer, output_weight, score)


def score_next_tokens(
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels_ob: Tensor,
    top_k: int,
    *,
    vocab_size: int,
    tail: TailDraws,
    num_ids: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a frozen model's losses of labels, its likeliest tokens and their log-probabilities.

    They are fp32 [o, b], int64 and fp32 [o, b, K]; K includes the additions of `TailDraws.behind`.
    Arguments are as in `score_labels`. The `top_k` likeliest are below `num_ids`, None:
    `vocab_size`. `tail`, with places [o, b], draws from tokens neither among them nor a label (-1:
    none).
    """

    def score(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        share = VocabularyShare.of(len(weight), vocab_size, group)
        losses, ids, log_probs = score_with_likeliest(
            hidden.flatten(0, 1),
            OutputLayer(weight),
            labels_ob.reshape(-1),
            top_k,
            vocab_size=num_ids,
            share=share,
            tail=tail,
        )
        ids, log_probs = tail.behind(ids, log_probs)
        shape = *labels_ob.shape, -1
        return losses.view(labels_ob.shape), ids.view(shape), log_probs.view(shape)

    return _with_hooks(hidden_states, output_layer, output_weight, score)


def _with_hooks[Found](
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    score: Callable[[Tensor, Tensor], Found],
) -> Found:
    """Apply a function inside the layer's hooks, which wait for --overlap-param-gather."""

    def forward(hidden: Tensor, weight: Tensor) -> Found:
        if output_layer.sequence_parallel:  # gradients are summed and split
            return score(gather_from_sequence_parallel_region(hidden), weight)
        return score(copy_to_tensor_model_parallel_region(hidden), weight)

    output_layer.forward = forward
    try:
        weight = output_layer.weight if output_weight is None else output_weight
        found: Found = output_layer(hidden_states, weight)
    finally:
        del output_layer.forward
    return found
