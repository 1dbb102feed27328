"""Proof, at load, that a model keeps the documents of a packed row apart.

Documents must have equal losses alone and packed, within a share of the difference that leaking
makes. Sliding windows are shortened to take effect.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.command_line.failures import hinted
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.logits import OutputLayer
from pipeline.models.devices import lacks_memory
from pipeline.models.output_layer import output_layer
from pipeline.models.packed_attention import PACKED_ATTENTION, packed_arguments, register
from pipeline.models.weights import UnfittingWeightsError, foreign_code, require_finite_weights

logger = logging.getLogger(__name__)

_ROWS = ((5, 14, 3), (12, 2, 1, 7))  # tokens of each document
_WINDOW = 6
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size")
# Orders of the same sums differ by rounding, leaking documents by much more: (share of that, nats
# that count as rounding in any case).
_TOLERANCES = {torch.float32: (0.02, 1e-5), torch.bfloat16: (0.1, 0.02), torch.float16: (0.1, 5e-3)}


class LeakingRowsError(ValueError):
    """Documents of a packed row see each other."""


def keep_documents_apart(
    model: PreTrainedModel, attention: str | None = None, *, packed: bool = True
) -> None:
    """Give a model an attention that keeps packed documents apart, and prove it.

    Args:
        model: on the device where it will run.
        attention: transformers' name of the only implementation to try; None: ours, else the
            model's own.
        packed: rows hold several documents; else one, and padding after it.

    Raises:
        LeakingRowsError: no such attention.
        ForeignCodeError: the model's own code fails.
        UnfittingWeightsError: weights aren't finite.

    Example:
        >>> keep_documents_apart(AutoModelForCausalLM.from_config(config))
    """
    register()
    own, training = _attention_of(model.config), model.training
    failures = []
    model.train(False)
    try:
        for candidate in (PACKED_ATTENTION, own[""]) if attention is None else (attention,):
            with foreign_code(f"{type(model).__name__} ({model.config.model_type})"):
                failure = _try_attention(model, candidate, own, packed)
            if failure is None:
                logger.info("%s: packed rows by %s", type(model).__name__, candidate)
                return
            model.set_attn_implementation(own)
            failures.append(f"{candidate}: {failure}")
    finally:
        model.train(training)
    error = LeakingRowsError(
        f"{type(model).__name__} ({model.config.model_type}) can't be run on "
        f"{'packed rows' if packed else 'rows of one document and padding'}: the losses of its "
        f"documents differ from those of each alone ({'; '.join(failures)}). As a teacher let "
        "vocag score run it, which takes a document at a time, and train with its "
        "stored_losses" + ("; as a student it needs rows of one document each" * packed)
    )
    raise hinted(error, "one_document_a_row=True") if packed else error


def _attention_of(config: Any) -> dict[str, str]:
    """Return a model's attention, and its parts': Gemma 4's for sounds takes "eager" alone."""
    parts = {"": config} | {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: str(p._attn_implementation) for name, p in parts.items() if p is not None}


def _try_attention(
    model: PreTrainedModel, candidate: str, own: dict[str, str], packed: bool
) -> str | None:
    for dtype in _dtypes(model):
        mixed = dtype != model.dtype
        try:
            with torch.no_grad(), torch.autocast(model.device.type, dtype, enabled=mixed):
                failure = _compare(model, candidate, own, dtype, packed)
        except Exception as error:
            if lacks_memory(error) or isinstance(error, UnfittingWeightsError):
                raise  # known to commands; not this attention's fault
            # An error of the model's own code: this attention doesn't suit it.
            failure = f"{type(error).__name__}: {error}"
        if failure is not None:
            return failure
    return None


def _dtypes(model: PreTrainedModel) -> tuple[torch.dtype, ...]:
    """On a GPU, fp32 weights often serve mixed precision."""
    if model.dtype == torch.float32 and model.device.type == "cuda":
        return torch.float32, torch.bfloat16
    return (model.dtype,)


def _compare(
    model: PreTrainedModel, candidate: str, own: dict[str, str], dtype: torch.dtype, is_packed: bool
) -> str | None:
    tried = _Documents.of(model)
    model.set_attn_implementation(own)
    whole = tried.losses_alone()
    with short_windows(model) as num_windows:
        alone = tried.losses_alone()
        leaking = tried.losses_packed(breaks=False)
        model.set_attn_implementation(own if candidate == own[""] else candidate)
        if model.config._attn_implementation != candidate:
            return "the model can't change its attention"
        packed = tried.losses_packed(breaks=True) if is_packed else tried.losses_padded()
    if not all(losses.isfinite().all() for losses in (alone, leaking, packed)):
        require_finite_weights(model)
    if candidate == PACKED_ATTENTION and num_windows and torch.equal(whole, alone):
        return "its sliding window can't be made short enough to be tried"
    if not alone.isfinite().all():
        logger.warning(
            "%s gives a document alone losses that are not finite: packed rows can't be held "
            "against them",
            type(model).__name__,
        )
        return None
    share, least = _TOLERANCES[dtype]
    difference = float((packed - alone).abs().max())
    allowed = max(share * float((leaking - alone).abs().max()), least)
    if difference <= allowed:
        return None
    return f"they differ by up to {difference:.2g} nats; rounding would be {allowed:.2g}"


@dataclass(frozen=True)
class _Documents:
    """Documents of random tokens, row by row, and the model that reads them."""

    model: PreTrainedModel
    layer: OutputLayer
    rows: list[list[Tensor]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        layer = output_layer(model)
        generator = torch.Generator().manual_seed(0)
        rows = [
            [
                torch.randint(layer.vocab_size, (n,), generator=generator).to(model.device)
                for n in lengths
            ]
            for lengths in _ROWS
        ]
        return cls(model, layer, rows)

    def losses_alone(self) -> Tensor:
        return self._losses(
            [
                self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
                for ids in chain(*self.rows)
            ]
        )

    def losses_packed(self, *, breaks: bool) -> Tensor:
        """Without breaks, documents see all before them, from the same positions."""
        return self._losses(self._states(self.rows, breaks=breaks))

    def losses_padded(self) -> Tensor:
        """Padding is a second document."""
        documents = [*chain(*self.rows)]
        longest = max(map(len, documents)) + 1
        padded = [[ids, ids.new_zeros(longest - len(ids))] for ids in documents]
        return self._losses(self._states(padded, breaks=True)[::2])

    def _states(self, rows: list[list[Tensor]], *, breaks: bool) -> list[Tensor]:
        """Each document's states in packed rows, [length, H]."""
        input_ids = torch.stack([torch.cat(documents) for documents in rows])
        places = [torch.cat([torch.arange(len(ids)) for ids in documents]) for documents in rows]
        positions = torch.stack(places).to(self.model.device)
        more: dict[str, Any] = {"attention_mask": torch.ones_like(input_ids)}
        if breaks:
            more = packed_arguments(self.model, positions)
        base = self.model.base_model
        hidden = base(
            input_ids=input_ids, position_ids=positions, use_cache=False, **more
        ).last_hidden_state
        lengths = [[len(ids) for ids in documents] for documents in rows]
        return [*chain(*(row.split(own) for row, own in zip(hidden, lengths, strict=True)))]

    def _losses(self, states: list[Tensor]) -> Tensor:
        labels = torch.cat([ids[1:] for ids in chain(*self.rows)])
        hidden = torch.cat([own[:-1] for own in states])
        return linear_cross_entropy(hidden, self.layer, labels).losses.float()


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[int]:
    """Shorten sliding windows, and blocks of keys, temporarily; yield their number."""
    own, base = model.config, getattr(model.base_model, "config", model.config)
    configs = {id(c): c for c in (own, base, own.get_text_config(decoder=True))}
    found = [
        (owner, name, getattr(owner, name))
        for owner in (*configs.values(), *model.modules())
        for name in _windows_of(owner)
        if isinstance(value := getattr(owner, name, None), int) and value > _WINDOW
    ]
    try:
        for owner, name, _ in found:
            setattr(owner, name, _WINDOW)
        yield len(found)
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


def _windows_of(owner: Any) -> tuple[str, ...]:
    chooses_blocks = hasattr(owner, "topk_blocks")  # of keys: MiniMax-M3's indexer
    return (*_WINDOW_NAMES, "block_size") if chooses_blocks else _WINDOW_NAMES
