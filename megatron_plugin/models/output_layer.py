"""Losses from a model's last hidden states, without logits of the whole vocabulary.

Dimensions: o places of a row that ranks of a tensor-parallel group hold together, b rows, h hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_plugin.upstream import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from pipeline.guidance.cross_entropy import TokenScores, linear_cross_entropy


def score_labels(
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels_ob: Tensor,
    *,
    vocab_size: int,
    loss_mask_ob: Tensor | None = None,
    with_entropy: bool = False,
) -> TokenScores:
    """Return what a model says of labels; an output processor of GPTModel calls it.

    Args:
        hidden_states: [o, b, h]; where tensor-parallel ranks share them, [o / ranks, b, h].
        output_layer: of the model, whose rows the ranks share.
        output_weight: of the output layer where that has none of its own.
        labels_ob: int64.
        vocab_size: without the padding of the embedding, which has no probability: the losses are
            those of the exported model.
        loss_mask_ob: as in `linear_cross_entropy`.
        with_entropy: as there.

    Returns:
        fp32 [o, b], the same on all ranks of the group; NaN for labels outside the vocabulary.
    """

    def score(hidden: Tensor, weight: Tensor | None) -> TokenScores:
        assert isinstance(weight, Tensor)
        if output_layer.sequence_parallel:  # gradients are added up, and each rank gets its part
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return linear_cross_entropy(
            hidden,
            weight,
            labels_ob,
            loss_mask=loss_mask_ob,
            vocab_size=vocab_size,
            with_entropy=with_entropy,
            group=parallel_state.get_tensor_model_parallel_group(),
            check_labels=False,
        )

    weight = output_layer.weight if output_weight is None else output_weight
    return _with_hooks(output_layer, score)(hidden_states, weight)


def _with_hooks(
    module: torch.nn.Module, forward: Callable[..., TokenScores]
) -> Callable[..., TokenScores]:
    """Return a function in place of a module's own, inside its hooks.

    A hook waits for weights that --overlap-param-gather still brings.
    """

    def call(*given: Tensor | None) -> TokenScores:
        module.forward = forward
        try:
            scores: TokenScores = module(*given)
        finally:
            del module.forward
        return scores

    return call
