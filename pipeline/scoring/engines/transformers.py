"""A frozen teacher's losses of whole documents.

Pieces are sorted by length and batched. Padding is at the end, where causal attention never looks,
so torch needs no mask and takes its fastest kernel. Batches depend on the shard and the options
alone, so the same teacher and machine give the same bytes.

Shapes: b pieces of a batch, l places of its longest piece, h hidden size, n tokens with a loss.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available

from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.likeliest import score_with_likeliest
from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.losses.tail import TailDraws, draw_keys
from pipeline.models.devices import find_device
from pipeline.models.fit import short_length
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.engine_settings import TransformersSettings
from pipeline.scoring.engines.interface import ScoredDocuments, Work, line_of
from pipeline.scoring.sidecars import DocumentTokens
from schemas.distribution_rule import DistributionRule
from schemas.stored_distributions import TopTokens

MAX_PADDING = 0.05
"""Share of a batch's places that may be padding."""
CPU_BATCH_TOKENS, ACCELERATOR_BATCH_TOKENS = 2048, 32768
DEFAULTS = TransformersSettings()
_NOT_FINITE = "its dtype is too narrow (try dtype=float32), or its weights are damaged"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Scorer:
    """A teacher on one device: an `Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        rule: ContextRule,
        *,
        batch_tokens: int = 0,
        distributions: DistributionRule | None = None,
    ) -> None:
        """Take a model of `load_language_model`.

        A batch has `batch_tokens` places (0: 2,048 on a CPU, 32,768 elsewhere), or one longer
        piece.
        """
        self.rule = rule
        self.distributions = distributions
        shape = model.config.get_text_config(decoder=True)
        self._max_length = int(getattr(shape, "max_position_embeddings", 0) or 1 << 62)
        self._short_length = short_length(model.config) or 0
        self._model = model.requires_grad_(False).train(False)
        self._layer = output_layer(model)
        self._device = self._layer.weight.device
        default = CPU_BATCH_TOKENS if self._device.type == "cpu" else ACCELERATOR_BATCH_TOKENS
        self._batch_tokens = batch_tokens or default

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        return self._layer.vocab_size

    @torch.inference_mode()
    def score(
        self,
        tokens: DocumentTokens,
        pieces: Pieces,
        *,
        names: Sequence[str] = (),
        advance: Callable[[int], object] = int,
    ) -> ScoredDocuments:
        """See `Engine.score`; NonFiniteLossError for NaN or infinity."""
        start = time.perf_counter()
        self._require_known(tokens, pieces)
        work = Work()
        losses = np.full(len(tokens.input_ids), np.nan, np.float32)
        rule = self.distributions
        top = None if rule is None else TopTokens.empty(tokens.starts, rule)
        places = [np.empty(0, np.int64)]

        def store(batch: PieceBatch, found: _Found) -> None:
            places.append(batch.targets)
            losses[batch.targets] = found.losses.cpu().numpy()
            if top is not None and found.ids is not None and found.log_probs is not None:
                log_probs = found.log_probs.float().cpu().numpy()
                _require_numbers(log_probs, batch.positions, tokens, names)
                top.put(batch.positions, found.ids.cpu().numpy(), log_probs)
                if found.draws is not None:
                    top.draws[batch.positions] = found.draws.cpu().numpy()

        # A batch's results are read once the next one is under way, so the device never waits.
        waiting: tuple[PieceBatch, _Found] | None = None
        lengths = self._lengths(pieces)
        for numbers in plan_batches(lengths, self._batch_tokens, apart=self._short_length):
            batch = make_batch(tokens, pieces, numbers, self.rule)
            found = self._forward(batch)
            if waiting is not None:
                store(*waiting)
            waiting = batch, found
            work.num_tokens += int(batch.lengths.sum())
            work.num_places += batch.input_ids.size
            advance(int(np.sum(pieces.stop[numbers] - pieces.start[numbers])))
        if waiting is not None:
            store(*waiting)
        _require_finite(losses, tokens, np.concatenate(places), names)
        work.seconds = time.perf_counter() - start
        return ScoredDocuments(losses, work, top)

    def _lengths(self, pieces: Pieces) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = pieces.stop - pieces.start
        for continues in (False, True):
            if self.rule.context_token(continues=continues) is not None:
                lengths += pieces.continues == continues
        return lengths

    def _forward(self, batch: PieceBatch) -> _Found:
        input_ids_bl = self._copied(batch.input_ids)
        output = self._model.base_model(input_ids=input_ids_bl, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1)
        places = self._copied(batch.places)
        labels_n = input_ids_bl.flatten()[places]
        # The state before a token predicts it.
        rule, states = self.distributions, places - 1
        if rule is None:
            # `_require_known` has checked them; here the host would wait.
            scores = linear_cross_entropy(hidden[states], self._layer, labels_n, check_labels=False)
            return _Found(scores.losses)
        ends = self._copied(batch.ends)
        labels = torch.cat([labels_n, torch.full_like(ends, -1)])  # nothing comes after a document
        states, tail = torch.cat([states, ends]), None
        if rule.draws:
            tail = TailDraws(self._copied(batch.draw_keys(rule.draws_seed))[states], rule.draws)
        losses, ids, log_probs = score_with_likeliest(
            hidden[states], self._layer, labels, rule.top_k, vocab_size=rule.vocab_size, tail=tail
        )
        return _Found(losses[: len(places)], ids, log_probs, None if tail is None else tail.ids)

    def _copied(self, array: NDArray[np.int64]) -> Tensor:
        """Copy to the device, from memory from which the host needn't wait for it."""
        tensor = torch.from_numpy(array)
        tensor = tensor.pin_memory() if self._device.type == "cuda" else tensor
        return tensor.to(self._device, non_blocking=True)

    def _require_known(self, tokens: DocumentTokens, pieces: Pieces) -> None:
        longest = int(self._lengths(pieces).max(initial=0))
        if longest > self._max_length:
            raise ValueError(
                f"a piece of a document has {longest} teacher tokens, the teacher was made for "
                f"{self._max_length} positions: lower teacher_seq_length"
            )
        largest = int(tokens.input_ids.max(initial=0))
        if largest >= self.vocab_size:
            raise ValueError(
                f"the data holds teacher token {largest}, the teacher knows {self.vocab_size}: "
                "name the model that the dataset's teacher tokenizer belongs to"
            )


class _Found(NamedTuple):
    """Results for n tokens, then for the ends of e documents, on the device."""

    losses: Tensor
    ids: Tensor | None = None
    log_probs: Tensor | None = None
    draws: Tensor | None = None


def load_scorer(
    source: str,
    rule: ContextRule,
    *,
    dtype: str,
    settings: TransformersSettings = DEFAULTS,
    distributions: DistributionRule | None = None,
) -> Scorer:
    """Load a teacher to score with: a folder, a Hugging Face repository, or a .gguf file.

    `dtype` is a key of `DTYPES`. Flash attention is used for half precision on a GPU, if installed.
    `settings.threads` sets this process's threads. Errors as in `load_language_model`.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = str(find_device(settings.device))
    wanted = DTYPES[dtype]
    flash = device.startswith("cuda") and wanted.itemsize == 2 and is_flash_attn_2_available()
    attention = "flash_attention_2" if flash else None
    # Each row is one piece, so no architecture must be refused.
    model = load_language_model(
        source, dtype=wanted, device=device, attention=attention, packed=False
    )
    return Scorer(model, rule, batch_tokens=settings.batch_tokens, distributions=distributions)


def _require_finite(
    losses: NDArray[np.float32],
    tokens: DocumentTokens,
    targets: NDArray[np.int64],
    names: Sequence[str],
) -> None:
    bad = targets[~np.isfinite(losses[targets])]
    if not len(bad):
        return
    place = int(bad.min())
    document, name = _document_at(place, tokens.starts, names)
    raise NonFiniteLossError(
        f"the teacher's loss of token {place - tokens.starts[document]} of document {name} is "
        f"{losses[place]}, and {len(bad) - 1} more are like it: {_NOT_FINITE}"
    )


def _require_numbers(
    log_probs: NDArray[np.float32],
    positions: NDArray[np.int64],
    tokens: DocumentTokens,
    names: Sequence[str],
) -> None:
    bad = positions[np.isnan(log_probs).any(axis=1)]
    if len(bad):
        place = int(bad.min())
        document, name = _document_at(place, tokens.position_starts, names)
        raise NonFiniteLossError(
            f"what the teacher expects after {place - tokens.position_starts[document]} tokens of "
            f"document {name} is nan: {_NOT_FINITE}"
        )


def _document_at(place: int, starts: NDArray[np.int64], names: Sequence[str]) -> tuple[int, str]:
    document = int(np.searchsorted(starts, place, "right")) - 1
    return document, json.dumps(names[document]) if names else str(document)


def plan_batches(
    lengths: NDArray[np.int64], batch_tokens: int, *, apart: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Yield the pieces of each batch, longest first.

    A batch exceeds neither `batch_tokens` places, padding included, nor `MAX_PADDING`. Pieces of up
    to `apart` tokens share none with longer ones.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    totals = np.concatenate([[0], np.cumsum(sorted_lengths)])
    num_long, start = int(np.sum(lengths > apart)), 0
    while start < len(order):
        longest = int(sorted_lengths[start])
        end = num_long if start < num_long else len(order)
        stop = min(end, start + max(1, batch_tokens // max(longest, 1)))
        places = longest * np.arange(1, stop - start + 1)
        used = totals[start + 1 : stop + 1] - totals[start]
        # Padding grows with every piece, so the first excess ends the batch.
        num_fitting = int(np.searchsorted(places - used > MAX_PADDING * places, True))
        stop = start + max(1, min(num_fitting, stop - start))
        yield order[start:stop]
        start = stop


@dataclass(frozen=True)
class PieceBatch:
    """A batch of pieces.

    Attributes:
        input_ids: [b, l], 0 after the end.
        places: [n], flat, of tokens whose losses are taken.
        targets: [n], their indices among the documents' tokens.
        positions: [n + e], as in `Line`, document ends last.
        ends: [e], flat places of those ends.
    """

    input_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    ends: NDArray[np.int64]

    def draw_keys(self, seed: int) -> NDArray[np.int64]:
        """Return the keys of the draws after each place, [b * l, 2]."""
        keys = np.zeros((*self.input_ids.shape, 2), np.int64)
        for row, length in enumerate(self.lengths.tolist()):
            keys[row, :length] = draw_keys(self.input_ids[row, :length], seed)
        return keys.reshape(-1, 2)


def make_batch(
    tokens: DocumentTokens, pieces: Pieces, numbers: NDArray[np.int64], rule: ContextRule
) -> PieceBatch:
    """Arrange pieces, by number, as the rectangle that a model reads."""
    lines = [line_of(tokens, pieces, number, rule) for number in numbers.tolist()]
    lengths = np.array([len(line.input_ids) for line in lines], np.int64)
    input_ids = np.zeros((len(lines), int(lengths.max())), np.int64)
    places, ends, after = [], [], []
    for row, line in enumerate(lines):
        input_ids[row, : len(line.input_ids)] = line.input_ids
        places.append(line.places + row * input_ids.shape[1])
        if len(line.positions) > len(line.targets):
            ends.append(len(line.input_ids) - 1 + row * input_ids.shape[1])
            after.append(line.positions[-1:])
    return PieceBatch(
        input_ids,
        lengths,
        np.concatenate(places),
        np.concatenate([line.targets for line in lines]),
        np.concatenate([*(line.positions[: len(line.targets)] for line in lines), *after]),
        np.array(ends, np.int64),
    )
