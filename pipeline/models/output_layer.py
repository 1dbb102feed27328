"""Output layers, and proof that losses computed from them are the models' own, left to right.

Only a model's code defines its configuration's fields, so 16 tokens' losses are compared at every
load.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from pipeline.losses.cross_entropy import linear_cross_entropy, wide_products
from pipeline.losses.logits import OutputLayer
from pipeline.models.weights import foreign_code, require_finite_weights

logger = logging.getLogger(__name__)

# Configuration fields that change logits.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
# The one family that multiplies by Granite's divisor (transformers 5.23).
_MULTIPLY_BY_DIVISORS = ("hyperclovax",)
_FIELDS = (*_CAPS, *_MULTIPLIERS, *_DIVISORS)
_REMEDY = (
    "as a teacher, serve the model and let vocag score --engine openai ask it; as a student, "
    "choose a model with a different architecture"
)

_NUM_TOKENS = 16
# Mean nats a token. The hidden states come from two runs in the model's dtype, equal to the last
# bit unless a kernel adds in varying order; from there on, both sides compute in fp32.
_TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.01}
_TOLERANCE = 1e-3
# The same, if a text goes on behind these tokens: products of other shapes round otherwise.
_NUM_FIRST = 9
_CHANGES = {torch.bfloat16: 0.3, torch.float16: 0.1}


class UnknownLogitsError(ValueError):
    """A model's losses can't be computed from its hidden states."""


def output_layer(model: PreTrainedModel) -> OutputLayer:
    """Return a model's output layer, with its configured scale and cap.

    Raises:
        UnknownLogitsError: no output layer, or one with a bias, other parameters or an adapter of
            peft.

    Example:
        >>> output_layer(load_language_model("models/granite")).scale  # doctest: +SKIP
        0.125
    """
    layer = cast(Any, model).get_output_embeddings()
    if layer is None or getattr(layer, "bias", None) is not None or _more_than_weight(layer):
        raise UnknownLogitsError(
            f"{type(model).__name__} has no output layer, or one with a bias or a scale for each "
            f"token, which losses are not computed from here: {_REMEDY}"
        )
    if hasattr(layer, "base_layer"):
        raise UnknownLogitsError(
            f"{type(model).__name__} has an adapter in its output layer, of which losses read the "
            "weight alone, so it would not count: leave the layer out of target_modules, train it "
            "whole by modules_to_save, or merge the adapter"
        )
    config = model.config.get_text_config(decoder=True)
    found = {name: float(value) for name in _FIELDS if (value := getattr(config, name, None))}
    scale = 1.0
    for name in (*_MULTIPLIERS, *_DIVISORS):
        divides = name in _DIVISORS and config.model_type not in _MULTIPLY_BY_DIVISORS
        factor = found.get(name, 1.0)
        scale *= 1 / factor if divides else factor
    cap = next((found[name] for name in _CAPS if name in found), None)
    return OutputLayer(layer.weight, scale, cap)


def _more_than_weight(layer: torch.nn.Module) -> bool:
    """Whether a layer learns something else, as Dory's a scale, which would get no gradient."""
    return any(name != "weight" for name, _ in layer.named_parameters(recurse=False))


@torch.no_grad()
def require_own_losses(model: PreTrainedModel) -> None:
    """Raise UnknownLogitsError unless losses computed here equal the model's own, left to right.

    ForeignCodeError if the model's code fails; UnfittingWeightsError if weights aren't finite.
    """
    layer = output_layer(model)
    ids = _some_tokens(model, layer.vocab_size)
    with _measuring(model):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    found = linear_cross_entropy(hidden[0, :-1], layer, ids[0, 1:]).losses
    own = _own_losses(model, ids)
    if not own.isfinite().all():
        require_finite_weights(model)
        logger.warning(
            "%s gives losses that are not finite: nothing can be compared with them",
            type(model).__name__,
        )
        return
    difference = float((found - own).abs().mean())
    if not difference <= _TOLERANCES.get(model.dtype, _TOLERANCE):
        raise UnknownLogitsError(
            f"{type(model).__name__} ({model.config.model_type}) computes its logits in a way that "
            f"isn't known here: {_NUM_TOKENS} tokens have a mean loss of {float(own.mean()):.4f} "
            f"nats by its own logits and of {float(found.mean()):.4f} by its hidden states and "
            f"output layer (scale {layer.scale:g}, cap {layer.cap}), {difference:.2g} apart per "
            f"token: {_REMEDY}"
        )
    _require_left_to_right(model, ids, own)


@torch.no_grad()
def require_left_to_right(model: PreTrainedModel) -> None:
    """Raise UnknownLogitsError if what comes after tokens changes their losses.

    Any output layer will do. ForeignCodeError if the model's code fails.
    """
    ids = _some_tokens(model, len(cast(Any, model).get_input_embeddings().weight))
    _require_left_to_right(model, ids, _own_losses(model, ids))


def _require_left_to_right(model: PreTrainedModel, ids: Tensor, losses: Tensor) -> None:
    alone = _own_losses(model, ids[:, :_NUM_FIRST])
    change = float((alone - losses[: len(alone)]).abs().mean())
    if change > _CHANGES.get(model.dtype, _TOLERANCE):
        raise UnknownLogitsError(
            f"{type(model).__name__} ({model.config.model_type}) reads texts in both directions, "
            f"as models of embeddings do: what comes after {len(alone)} tokens changes their "
            f"losses by {change:.2g} nats each, so it sees the tokens that it is to predict: name "
            "a model that reads from left to right"
        )


def _own_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with _measuring(model), _wide_logits(model):
        logits = cast(Any, model)(input_ids=ids, use_cache=False).logits
    return cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")


def _some_tokens(model: PreTrainedModel, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, _NUM_TOKENS + 1), generator=generator)
    return ids.to(model.device)


@contextmanager
def _measuring(model: PreTrainedModel) -> Iterator[None]:
    """Compute as without training; an error of the model's code is a sentence."""
    training = model.training
    model.train(False)
    try:
        with foreign_code(f"{type(model).__name__} ({model.config.model_type})"):
            yield
    finally:
        model.train(training)


@contextmanager
def _wide_logits(model: PreTrainedModel) -> Iterator[None]:
    """Give fp32 logits temporarily: bf16 rounds them to tenths.

    A layer that gives something else than its product (Dory's learns a scale for each token) keeps
    that.
    """

    def widen(layer: torch.nn.Module, inputs: tuple[Tensor, ...], own: Tensor) -> Tensor:
        states = inputs[0]
        narrow = linear(states, cast(Tensor, layer.weight))
        if own.dtype != narrow.dtype or not torch.equal(own, narrow):
            return own
        products = wide_products(states.flatten(0, -2), cast(Tensor, layer.weight))
        return products.view(*states.shape[:-1], -1)

    layer = cast(Any, model).get_output_embeddings()
    if not hasattr(layer, "weight"):
        yield
        return
    handle = layer.register_forward_hook(widen)
    try:
        yield
    finally:
        handle.remove()
