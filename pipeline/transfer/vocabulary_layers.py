"""Change a model's vocabulary, or keep fewer of its layers."""

import copy
from collections.abc import Sequence
from textwrap import shorten
from typing import Any, cast

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.models.packed_check import short_windows
from pipeline.models.weights import make_model
from pipeline.transfer.measure import positions_behind_padding
from pipeline.transfer.origins import MEAN, Origins

_LAYERS = "model.layers."
_NUM_TOKENS = 16


class UntransferableError(ValueError):
    """A model can't be given another vocabulary."""


def transfer_rows(rows: Tensor, origins: Origins, *, num_rows: int) -> Tensor:
    """Return rows of a new vocabulary, each the weighted mean of its origins.

    `rows` are float [V_old, …]; those beyond `num_old` are padding. New rows beyond the vocabulary
    get the mean; tokens beyond `num_rows` get none.
    """
    wide = rows.detach().cpu().double().reshape(len(rows), -1)
    made = origins.new_ids < num_rows
    places = torch.from_numpy(np.stack((origins.new_ids[made], origins.old_ids[made])))
    shares = torch.from_numpy(origins.shares[made])
    shape = (num_rows, len(rows))
    matrix = torch.sparse_coo_tensor(places, shares, shape, check_invariants=True)
    new = torch.sparse.mm(matrix, wide)
    unknown = torch.ones(num_rows, dtype=torch.bool)
    unknown[: len(origins.rules)] = torch.from_numpy(origins.rules[:num_rows] == MEAN)
    new[unknown] = wide[: origins.num_old].mean(0)
    shaped: Tensor = new.reshape(num_rows, *rows.shape[1:])
    return shaped.to(rows.dtype).to(rows.device)


def transfer_vocabulary(
    model: PreTrainedModel,
    origins: Origins,
    *,
    num_rows: int | None = None,
) -> None:
    """Give a causal language model a new vocabulary, in place; `num_rows` None: one per new token.

    Raises:
        UntransferableError: unknown kinds of embeddings or output layer, or another part has a row
            per token.
    """
    require_transferable(model)
    inner = cast(Any, model)
    embeddings, output = inner.get_input_embeddings(), inner.get_output_embeddings()
    num_rows = num_rows or len(origins.rules)
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


def require_transferable(model: PreTrainedModel) -> None:
    """Raise UntransferableError if more than embeddings and output layer is by token.

    Or if these don't follow from the configuration's `vocab_size`.
    """
    inner = cast(Any, model)
    embeddings, output = inner.get_input_embeddings(), inner.get_output_embeddings()
    if not isinstance(embeddings, nn.Embedding) or not isinstance(output, nn.Linear):
        raise UntransferableError(
            f"{type(model).__name__} has embeddings of {type(embeddings).__name__} and an output "
            f"layer of {type(output).__name__}, not nn.Embedding and nn.Linear"
        )
    own = {id(p) for p in (embeddings.weight, output.weight, output.bias)}
    config = model.config.get_text_config(decoder=True)
    # Gemma 3n's further embeddings have fewer rows.
    sizes = {embeddings.num_embeddings, getattr(config, "vocab_size_per_layer_input", None)}
    others = [
        name
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if id(value) not in own and not sizes.isdisjoint(value.shape)
    ]
    if others:
        raise UntransferableError(
            f"{type(model).__name__} has {embeddings.num_embeddings} tokens, and rows for tokens "
            f"also in {', '.join(others[:3])}: what these mean for a new vocabulary isn't known "
            "here; choose a model whose tokens have embeddings and an output layer alone"
        )
    for name, padding in positions_behind_padding(model).items():
        raise UntransferableError(
            f"{type(model).__name__} counts the positions of {name} from its padding's id, "
            f"{padding}, which another vocabulary changes: choose a model whose positions don't "
            "depend on its tokens"
        )
    shape: Any = copy.deepcopy(model.config)
    shape.get_text_config().vocab_size = wide = 2 * embeddings.num_embeddings
    with torch.device("meta"):
        other = cast(Any, make_model(shape))
    parts = other.get_input_embeddings(), other.get_output_embeddings()
    rows = [len(part.weight) for part in parts]
    if rows != [wide, wide]:
        raise UntransferableError(
            f"{type(model).__name__} would have {rows[0]} embeddings and {rows[1]} rows of output "
            f"for a vocab_size of {wide}, so it couldn't be loaded with another vocabulary: choose "
            "a model whose configuration gives its rows by vocab_size alone"
        )


def require_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raise UntransferableError unless a model can have these layers, under Llama's names."""
    count = len(getattr(getattr(model, "model", None), "layers", ()))
    if not count or count != getattr(model.config, "num_hidden_layers", None):  # multimodal: None
        raise UntransferableError(
            f"{type(model).__name__} doesn't have all layers under {_LAYERS!r}: its weights aren't "
            "named like Llama's; leave --layers out"
        )
    if not layers or not all(0 <= layer < count for layer in layers):
        raise UntransferableError(
            f"--layers {' '.join(map(str, layers))} must be some of 0 … {count - 1}, the model's"
        )
    try:
        _shape_with_layers(model, layers).validate()
    except StrictDataclassError as error:
        raise UntransferableError(
            f"--layers {' '.join(map(str, layers))}: {type(model).__name__} can't have these alone "
            f"({' '.join(str(error).split())}): keep others, too"
        ) from error


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy of a model with some of its layers, by number, in order.

    Raises:
        UntransferableError: missing layers, unknown names, or an unknown dependence on layers'
            numbers.
    """
    require_layers(model, layers)
    try:
        pruned, ordered = _with_layers(model, layers), sorted({*layers})
        same = pruned if [*layers] == ordered else _with_layers(model, ordered)
        torch.testing.assert_close(
            *_logits(model, same, ordered), rtol=1e-3, atol=1e-3, equal_nan=True
        )
    except (AssertionError, RuntimeError, ValueError, LookupError, TypeError) as error:
        named = ", ".join(name for name in model.config.to_dict() if "layer" in name)
        raise UntransferableError(
            f"{type(model).__name__} with layers {[*layers]} alone isn't what these compute where "
            f"they are ({shorten(str(error), 200)}): they depend on their numbers in a way that "
            f"isn't known here (its configuration says {named}); leave --layers out"
        ) from error
    return pruned


def _shape_with_layers(model: PreTrainedModel, layers: Sequence[int]) -> Any:
    config = cast(Any, copy.deepcopy(model.config))
    count, config.num_hidden_layers = config.num_hidden_layers, len(layers)
    for name, values in config.to_dict().items():
        if isinstance(values, (list, tuple)) and "token_id" not in name:
            setattr(config, name, _of_layers(name, list(values), layers, count))
    return config


def _with_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    weights = {n: own for n, own in model.state_dict().items() if not n.startswith(_LAYERS)}
    for place, layer in enumerate(layers):
        own = model.get_submodule(f"{_LAYERS}{layer}")
        weights |= own.state_dict(prefix=f"{_LAYERS}{place}.")
    pruned = make_model(_shape_with_layers(model, layers), dtype=model.dtype)
    pruned.load_state_dict(weights)
    pruned.generation_config = model.generation_config
    pruned.train(model.training)
    return pruned


def _of_layers(name: str, values: list[Any], layers: Sequence[int], count: int) -> list[Any]:
    """Return a configuration list for the remaining layers, by their new numbers.

    It names layers (Llama 4's `moe_layers`), has an entry for each (SmolLM3's `no_rope_layers`), or
    isn't about layers.
    """
    numbers = all(type(value) is int and 0 <= value < count for value in values)
    if "layer" in name and numbers and values == sorted({*values}):
        return [place for place, layer in enumerate(layers) if layer in values]
    return [values[layer] for layer in layers] if len(values) == count else values


@torch.inference_mode()
def _logits(model: PreTrainedModel, pruned: PreTrainedModel, layers: Sequence[int]) -> list[Tensor]:
    """Return the logits of 16 tokens by a pruned model, and by the same layers in place.

    Windows are narrowed: 16 tokens wouldn't show them.
    """

    def pass_on(_: nn.Module, args: Any, given: dict[str, Any], output: Any) -> Any:
        states = args[0] if args else given["hidden_states"]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    every = enumerate(cast(Any, model).model.layers)
    left = [layer for number, layer in every if number not in layers]
    hooks = [layer.register_forward_hook(pass_on, with_kwargs=True) for layer in left]
    ids = torch.arange(_NUM_TOKENS, device=model.device)[None]
    try:
        with short_windows(pruned), short_windows(model):
            return [
                cast(Any, one)(input_ids=ids, use_cache=False).logits for one in (pruned, model)
            ]
    finally:
        for hook in hooks:
            hook.remove()
