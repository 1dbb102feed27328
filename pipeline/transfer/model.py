"""A model's layers that have a row a token, made for another vocabulary; and fewer layers."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.transfer.origins import MEAN, Origins

_LAYERS = "model.layers."


class UntransferableError(ValueError):
    """A model that can't be given another vocabulary."""


def transfer_rows(rows: Tensor, origins: Origins, *, num_rows: int) -> Tensor:
    """Return rows of a new vocabulary, each the weighted mean of those that it comes from.

    Args:
        rows: float [V_old, …], such as embeddings or an output layer's bias; rows beyond the old
            tokenizer's vocabulary are padding, which no token comes from.
        origins: of the tokens.
        num_rows: at least as many as new tokens; the rest is padding and gets the mean.

    Example:
        >>> origins = Origins(np.array([2], np.uint8), np.array([0, 0]), np.array([1, 2]),
        ...                   np.array([0.5, 0.5]))
        >>> transfer_rows(torch.tensor([[9.0], [2.0], [4.0]]), origins, num_rows=1)
        tensor([[3.]])
    """
    wide = rows.detach().cpu().double().reshape(len(rows), -1)
    places = torch.from_numpy(np.stack((origins.new_ids, origins.old_ids)))
    shares = torch.from_numpy(origins.shares)
    shape = (num_rows, len(rows))
    matrix = torch.sparse_coo_tensor(places, shares, shape, check_invariants=True)
    new = torch.sparse.mm(matrix, wide)
    unknown = torch.ones(num_rows, dtype=torch.bool)
    unknown[: len(origins.rules)] = torch.from_numpy(origins.rules == MEAN)
    new[unknown] = wide.mean(0)
    shaped: Tensor = new.reshape(num_rows, *rows.shape[1:])
    return shaped.to(rows.dtype).to(rows.device)


def transfer_vocabulary(
    model: PreTrainedModel,
    origins: Origins,
    *,
    multiple: int = 1,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Give a model another vocabulary, in place: embeddings, output layer and its bias.

    Args:
        model: a causal language model.
        origins: of `pipeline.transfer.origins.find_origins`.
        multiple: of the number of rows; rows beyond the vocabulary are padding.
        bos_token_id: of the new vocabulary, for the model's configuration.
        eos_token_id: the same.

    Raises:
        UntransferableError: something else in the model has a row a token.

    Example:
        >>> transfer_vocabulary(model, find_origins(new, old, pairs))  # doctest: +SKIP
    """
    inner = cast(Any, model)
    embeddings, output = inner.get_input_embeddings(), inner.get_output_embeddings()
    _require_transferable(model, embeddings, output)
    num_rows = -(-len(origins.rules) // multiple) * multiple
    tied = output.weight is embeddings.weight
    bias = getattr(output, "bias", None)
    weight = transfer_rows(embeddings.weight, origins, num_rows=num_rows)
    of_output = weight if tied else transfer_rows(output.weight, origins, num_rows=num_rows)
    of_bias = None if bias is None else transfer_rows(bias, origins, num_rows=num_rows)
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    output = inner.get_output_embeddings()
    inner.get_input_embeddings().weight.data.copy_(weight)
    output.weight.data.copy_(of_output)
    if of_bias is not None:
        output.bias.data.copy_(of_bias)
    for configuration in (model.config, model.generation_config):
        if configuration is not None:
            configuration.bos_token_id, configuration.eos_token_id = bos_token_id, eos_token_id
            configuration.pad_token_id = None


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy of a model with some of its layers, in the order given: pruned in depth.

    Args:
        model: whose layers are `model.layers` of its weights' names, as in Llama, Qwen or Mistral.
        layers: the numbers of those that stay.

    Raises:
        UntransferableError: layers that the model lacks, or a model whose layers have other names.

    Example:
        >>> keep_layers(model, (0, 1, 28, 29)).config.num_hidden_layers  # doctest: +SKIP
        4
    """
    count = cast(Any, model.config).num_hidden_layers
    if not layers or not all(0 <= layer < count for layer in layers):
        raise UntransferableError(
            f"layers {list(layers)} must be some of 0 … {count - 1}, the model's"
        )
    config = cast(Any, copy.deepcopy(model.config))
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    weights, by_layer = _weights_by_layer(model, count)
    for place, layer in enumerate(layers):
        weights |= {f"{_LAYERS}{place}.{name}": weight for name, weight in by_layer[layer].items()}
    pruned = cast(Any, AutoModelForCausalLM).from_config(config, dtype=model.dtype)
    pruned.load_state_dict(weights)
    return cast(PreTrainedModel, pruned)


def _weights_by_layer(
    model: PreTrainedModel, count: int
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return the weights outside the layers, and those of each layer by their names in it."""
    outside: dict[str, Tensor] = {}
    by_layer: dict[int, dict[str, Tensor]] = {}
    for name, weight in model.state_dict().items():
        if not name.startswith(_LAYERS):
            outside[name] = weight
            continue
        number, _, inner = name.removeprefix(_LAYERS).partition(".")
        by_layer.setdefault(int(number), {})[inner] = weight
    if len(by_layer) != count:
        raise UntransferableError(
            f"{type(model).__name__} has {len(by_layer)} of {count} layers under {_LAYERS!r}: its "
            "weights aren't named like Llama's; leave --layers out"
        )
    return outside, by_layer


def _require_transferable(
    model: PreTrainedModel, embeddings: nn.Module | None, output: nn.Module | None
) -> None:
    if not isinstance(embeddings, nn.Embedding) or not isinstance(output, nn.Linear):
        raise UntransferableError(
            f"{type(model).__name__} has embeddings of {type(embeddings).__name__} and an output "
            f"layer of {type(output).__name__}, not nn.Embedding and nn.Linear"
        )
    own = {id(p) for layer in (embeddings, output) for p in layer.parameters()}
    size = embeddings.num_embeddings
    others = [
        name
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if id(value) not in own and size in value.shape
    ]
    if others:
        raise UntransferableError(
            f"{type(model).__name__} has {size} tokens, and so many rows also in "
            f"{', '.join(others[:3])}: what these mean for a new vocabulary isn't known here; "
            "choose a model whose tokens have embeddings and an output layer alone"
        )
