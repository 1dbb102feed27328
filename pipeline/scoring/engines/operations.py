"""Floating point operations of a model's forward pass, by its weights and configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.nn import Embedding, Parameter
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# What configurations of transformers 5 call the experts of a layer, and those that a token goes to.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
           "top_k_experts")  # fmt: skip


def operations_per_token(model: PreTrainedModel) -> Callable[[NDArray[np.int64]], float]:
    """Return a function from lengths to the operations of a forward pass over such pieces.

    Two per weight of every matrix and token, the output layer included, and those of causal
    attention: two products of length**2 / 2, one by the width of all heads' keys, one by that of
    their values. Of experts those count that a token is routed to; of a model that sees, too, the
    decoder of text. A sliding window is counted as if it were open.

    Example:
        >>> operations_per_token(model)(np.array([512, 80]))  # doctest: +SKIP
        162529280.0
    """
    config = model.config.get_text_config(decoder=True)
    layers = _layers(config)
    # Where some layers are dense, the first ones are.
    count, routed = _experts(layers[-1] if layers else config)
    weights = _active_weights(model, count, routed)
    width = _attention_width(config, layers)

    def operations(lengths: NDArray[np.int64]) -> float:
        squares = float(np.square(lengths.astype(np.float64)).sum())
        return 2.0 * weights * float(lengths.sum()) + width * squares

    return operations


def _active_weights(model: PreTrainedModel, count: float, routed: float) -> float:
    """Return the weights that a token is multiplied with.

    Args:
        model: the model.
        count: experts of a layer.
        routed: of them, those that a token goes to.
    """
    cast_model = cast(Any, model)
    decoder, output = cast_model.get_decoder(), cast_model.get_output_embeddings().weight
    # Looking embeddings up is no arithmetic; the output layer's may be the same.
    looked_up = {id(m.weight) for m in decoder.modules() if isinstance(m, Embedding)}
    active = float(output.numel())
    for name, parameter in decoder.named_parameters():
        if parameter is output or id(parameter) in looked_up or not _is_matrix(name, parameter):
            continue
        is_expert = ".experts." in name or (parameter.dim() == 3 and len(parameter) == count)
        if is_expert and not count:
            logger.warning("%s: how many experts a token goes to isn't known; all count", name)
        active += parameter.numel() * (routed / count if is_expert and count else 1.0)
    return active


def _is_matrix(name: str, parameter: Parameter) -> bool:
    """Whether a parameter is multiplied with; experts' biases have two dimensions, too."""
    return parameter.dim() > 1 and not name.endswith("bias")


def _experts(config: Any) -> tuple[float, float]:
    """Return a layer's experts, and those that a token goes to; zeros where it says neither."""
    places = (config, getattr(config, "ffn_config", None))
    count, routed = (
        [getattr(place, name, None) for place in places for name in names]
        for names in (_EXPERTS, _ROUTED)
    )
    # A list is by layer.
    found = [next((float(np.mean(n)) for n in each if n), 0.0) for each in (count, routed)]
    return (found[0], found[1]) if all(found) else (0.0, 0.0)


def _attention_width(config: Any, layers: Sequence[Any]) -> float:
    """Return the columns of all heads' keys and values together, summed over layers that attend."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    attends = ["attention" in kind and kind != "linear_attention" for kind in kinds or ()]
    widths = map(_layer_width, layers)
    return sum(w for w, own in zip(widths, attends or [True] * len(layers), strict=False) if own)


def _layer_width(config: Any) -> float:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # a recurrent model
        return 0.0
    own = getattr(config, "head_dim", None) or config.hidden_size // heads
    latent = getattr(config, "qk_nope_head_dim", None)
    keys = own if latent is None else latent + config.qk_rope_head_dim
    values = getattr(config, "v_head_dim", None) or own
    return float(heads * (keys + values))


def _layers(config: Any) -> Sequence[Any]:
    """Return each layer's configuration; some of a newer transformers' differ by layer."""
    count = getattr(config, "num_hidden_layers", None) or 0
    by_layer = getattr(config, "per_layer_config", None)
    return [config] * count if by_layer is None else [by_layer[n] for n in range(count)]
