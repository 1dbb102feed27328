"""Another vocabulary for a trained model: new embeddings from the old, and its layers thinned out.

A student for an experiment across vocabularies should know its language, and there is rarely one
of the wanted size and vocabulary. Both are made here from a model that exists; a few minutes of
plain training then heal what was cut.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.batches import AlignedBatch

_LAYERS = "model.layers."


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """How often tokens of two vocabularies cover the same text.

    Attributes:
        new_ids: int64 [P].
        old_ids: int64 [P].
        weights: float64 [P]; a new token's occurrence counts once, shared by the old tokens that
            cover it.
    """

    new_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    old_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def joined(self, other: "TokenPairs") -> "TokenPairs":
        """Return the pairs of both, each once."""
        return _each_once(
            np.concatenate((self.new_ids, other.new_ids)),
            np.concatenate((self.old_ids, other.old_ids)),
            np.concatenate((self.weights, other.weights)),
        )


def count_pairs(batches: Iterable[AlignedBatch]) -> TokenPairs:
    """Count which old tokens cover each new one in a text.

    Args:
        batches: `align_batch(documents, new_tokenizer, old_tokenizer)`: the new vocabulary stands
            in the student's place, the old one in the teacher's.

    Example:
        >>> count_pairs([align_batch(documents, new, old)]).weights.sum()  # doctest: +SKIP
        82000.0
    """
    pairs = TokenPairs()
    for batch in batches:
        spans = batch.teacher_spans.astype(np.int64)
        widths = spans[:, 1] - spans[:, 0]
        document = np.repeat(
            np.arange(batch.student.num_documents), np.diff(batch.student.cu_tokens)
        )
        first = batch.teacher.cu_tokens[document] + spans[:, 0]
        # Every token of every span: its span's first place, and how far it stands behind it.
        behind = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
        old = batch.teacher.input_ids[np.repeat(first, widths) + behind].astype(np.int64)
        new = np.repeat(batch.student.input_ids.astype(np.int64), widths)
        pairs = pairs.joined(_each_once(new, old, np.repeat(1 / np.maximum(widths, 1), widths)))
    return pairs


def transfer_embeddings(
    embeddings: Tensor, pairs: TokenPairs, num_tokens: int
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return embeddings of a new vocabulary: each the mean of the old ones that cover its token.

    Args:
        embeddings: float [V_old, H].
        pairs: of a text in which the new tokens occur.
        num_tokens: V_new.

    Returns:
        [V_new, H] like `embeddings`, and bool [V_new], which tokens occurred; the others got the
        mean of all old embeddings.

    Raises:
        ValueError: ids beyond either vocabulary.

    Example:
        >>> pairs = TokenPairs(np.array([0, 0]), np.array([1, 2]), np.array([0.5, 0.5]))
        >>> transfer_embeddings(torch.tensor([[9.0], [2.0], [4.0]]), pairs, 1)[0]
        tensor([[3.]])
    """
    for side, ids, size in (
        ("new", pairs.new_ids, num_tokens),
        ("old", pairs.old_ids, len(embeddings)),
    ):
        if ids.max(initial=-1) >= size:
            raise ValueError(
                f"{side} token {ids.max()} exceeds the {side} vocabulary's {size}: the text was "
                "aligned with other tokenizers"
            )
    totals = np.bincount(pairs.new_ids, pairs.weights, num_tokens)
    places = torch.from_numpy(np.stack((pairs.new_ids, pairs.old_ids)))
    shares = torch.from_numpy(pairs.weights / totals[pairs.new_ids])
    shape = (num_tokens, len(embeddings))
    matrix = torch.sparse_coo_tensor(places, shares, shape, check_invariants=True)
    means = torch.sparse.mm(matrix, embeddings.detach().cpu().double())
    occurred = totals > 0
    means[~torch.from_numpy(occurred)] = embeddings.detach().cpu().double().mean(0)
    return means.to(embeddings.dtype).to(embeddings.device), occurred


def transfer_vocabulary(
    model: PreTrainedModel,
    pairs: TokenPairs,
    num_tokens: int,
    *,
    same: Mapping[int, int] | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> int:
    """Give a model another vocabulary, in place; return how many tokens never occurred.

    Args:
        model: a causal language model.
        pairs: of `count_pairs`.
        num_tokens: of the new vocabulary.
        same: new ids by the old id that means the same, such as what ends a document.
        bos_token_id: of the new vocabulary, for the model's configuration.
        eos_token_id: likewise.

    Example:
        >>> transfer_vocabulary(model, pairs, 8192, same={0: 0})  # doctest: +SKIP
        17
    """
    same = dict(same or {})
    inner = cast(Any, model)
    tied = inner.get_output_embeddings().weight is inner.get_input_embeddings().weight
    layers = [inner.get_input_embeddings()] + ([] if tied else [inner.get_output_embeddings()])
    weights = []
    for layer in layers:
        weight, occurred = transfer_embeddings(layer.weight, pairs, num_tokens)
        for new_id, old_id in same.items():
            weight[new_id] = layer.weight[old_id].detach()
            occurred[new_id] = True
        weights.append(weight)
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    layers = [inner.get_input_embeddings()] + ([] if tied else [inner.get_output_embeddings()])
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight)
    for configuration in (model.config, model.generation_config):
        if configuration is not None:
            configuration.bos_token_id, configuration.eos_token_id = bos_token_id, eos_token_id
            configuration.pad_token_id = None
    return int((~occurred).sum())


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy of a model with some of its layers, in the order given: pruned in depth.

    Args:
        model: whose layers are `model.layers` of its weights' names, as in Llama, Qwen or Mistral.
        layers: the numbers of those that stay.

    Raises:
        ValueError: layers that the model lacks, or a model whose layers have other names.

    Example:
        >>> keep_layers(model, (0, 1, 28, 29)).config.num_hidden_layers  # doctest: +SKIP
        4
    """
    count = cast(Any, model.config).num_hidden_layers
    if not layers or not all(0 <= layer < count for layer in layers):
        raise ValueError(f"layers {list(layers)} must be some of 0 … {count - 1}, the model's")
    config = cast(Any, copy.deepcopy(model.config))
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    rest, by_layer = _weights_by_layer(model, count)
    for place, layer in enumerate(layers):
        rest |= {f"{_LAYERS}{place}.{name}": weight for name, weight in by_layer[layer].items()}
    pruned = cast(Any, AutoModelForCausalLM).from_config(config, dtype=model.dtype)
    pruned.load_state_dict(rest)
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
        raise ValueError(
            f"{type(model).__name__} has {len(by_layer)} of {count} layers under {_LAYERS!r}: its "
            "weights have other names than Llama's"
        )
    return outside, by_layer


def _each_once(
    new_ids: NDArray[np.int64], old_ids: NDArray[np.int64], weights: NDArray[np.float64]
) -> TokenPairs:
    """Add up the weights of equal pairs."""
    width = int(old_ids.max(initial=0)) + 1
    keys, place = np.unique(new_ids * width + old_ids, return_inverse=True)
    totals = np.bincount(place, weights, len(keys)).astype(np.float64)
    return TokenPairs(keys // width, keys % width, totals)
