"""A frozen teacher's losses of whole documents, each token's once.

    rule = ContextRule.of_rows(PackingRules.of_dataset(manifest, seq_length=2048))
    teacher = load_scorer("models/teacher", rule, dtype="bfloat16", device="cuda")
    teacher.score(tokens, rule.pieces(index)).losses      # float32 [M], NaN where no context stands

Pieces of documents (`pipeline.scoring.contexts`) are sorted by length and batched until padding
would exceed 5 %; padding stands at the end, where causal attention never looks from a token, so no
mask is needed and torch takes its fastest attention kernel. The output layer runs over tokens that
have a loss, in chunks of the vocabulary. Which pieces share a batch depends on the shard and the
options alone: the same teacher, options and machine give the same bytes.

Shapes: b pieces of a batch, l places of its longest piece, h hidden size, n tokens with a loss.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available

from pipeline.guidance import NonFiniteLossError
from pipeline.guidance.cross_entropy import linear_cross_entropy
from pipeline.models.hf_models import load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.scoring.contexts import ContextRule, Pieces
from pipeline.scoring.engines.batches import PieceBatch, make_batch, plan_batches
from pipeline.scoring.engines.interface import ScoredDocuments, Work
from pipeline.scoring.engines.settings import TransformersSettings
from pipeline.scoring.sidecars import DocumentTokens

CPU_BATCH_TOKENS, ACCELERATOR_BATCH_TOKENS = 2048, 32768
DEFAULTS = TransformersSettings()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Scorer:
    """A teacher that is ready to score, on one device.

    Attributes:
        rule: with which context.
        dtype: of weights and activations, such as "float32".
        max_length: places that the model was made for.
    """

    def __init__(self, model: PreTrainedModel, rule: ContextRule, *, batch_tokens: int = 0) -> None:
        """Take a model, on its device.

        Args:
            model: a causal language model, from `pipeline.models.hf_models.load_language_model`.
            rule: with which context.
            batch_tokens: places per batch; 0: 2,048 on a CPU, 32,768 elsewhere. A longer piece is
                a batch of its own.

        Raises:
            ValueError: an output layer that chunked cross entropy does not cover.
        """
        self.rule = rule
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.max_length = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 62)
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
        """Give each token the loss `-log P(x_l | its context)`, see `Engine.score`.

        Raises:
            ValueError: a token id or a piece that the model does not know or is too short for.
            NonFiniteLossError: the model gave NaN or infinity.
        """
        start = time.perf_counter()
        self._require_known(tokens, pieces)
        work = Work()
        losses = np.full(len(tokens.input_ids), np.nan, np.float32)
        # The device is asked for results only at the end, so that it never waits for this loop.
        parts: list[tuple[NDArray[np.int64], Tensor]] = []
        for numbers in plan_batches(self._lengths(pieces), self._batch_tokens):
            batch = make_batch(tokens, pieces, numbers, self.rule)
            parts.append((batch.targets, self._forward(batch)))
            work.num_tokens += int(batch.lengths.sum())
            work.num_places += batch.input_ids.size
            advance(int(np.sum(pieces.stop[numbers] - pieces.start[numbers])))
        for targets, values in parts:
            losses[targets] = values.cpu().numpy()
        targets = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
        _require_finite(losses, tokens, targets, names)
        work.seconds = time.perf_counter() - start
        return ScoredDocuments(losses, work)

    def _lengths(self, pieces: Pieces) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = pieces.stop - pieces.start
        for continues in (False, True):
            if self.rule.context_token(continues=continues) is not None:
                lengths += pieces.continues == continues
        return lengths

    def _forward(self, batch: PieceBatch) -> Tensor:
        """Return the losses of a batch's targets, float32 [n], on the device."""
        input_ids_bl = torch.from_numpy(batch.input_ids).to(self._device, non_blocking=True)
        output = self._model.base_model(input_ids=input_ids_bl, use_cache=False)
        places = torch.from_numpy(batch.places).to(self._device, non_blocking=True)
        # The state before a token predicts it.
        hidden_nh = output.last_hidden_state.flatten(0, 1)[places - 1]
        labels_n = input_ids_bl.flatten()[places]
        return linear_cross_entropy(hidden_nh, self._layer, labels_n).losses

    def _require_known(self, tokens: DocumentTokens, pieces: Pieces) -> None:
        longest = int(self._lengths(pieces).max(initial=0))
        if longest > self.max_length:
            raise ValueError(
                f"a piece of a document has {longest} teacher tokens, the teacher was made for "
                f"{self.max_length} positions: lower --teacher-seq-length"
            )
        largest = int(tokens.input_ids.max(initial=0))
        if largest >= self.vocab_size:
            raise ValueError(
                f"the data holds teacher token {largest}, the teacher knows {self.vocab_size}: "
                "name the model that the dataset's teacher tokenizer belongs to"
            )


def load_scorer(
    source: str,
    rule: ContextRule,
    *,
    dtype: str,
    settings: TransformersSettings = DEFAULTS,
) -> Scorer:
    """Load a teacher to score with.

    Flash attention is taken where its package and a GPU are there and the dtype is half precision;
    torch's own kernels elsewhere.

    Args:
        source: a folder, a Hugging Face repository, or a .gguf file.
        rule: with which context.
        dtype: "float32", "bfloat16" or "float16".
        settings: where it runs, and how; its number of threads is this process's from now on.

    Raises:
        ValueError: a model that can't be scored with.
        OSError: nothing there.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device or default_device()
    wanted = DTYPES[dtype]
    flash = device.startswith("cuda") and wanted.itemsize == 2 and is_flash_attn_2_available()
    attention = "flash_attention_2" if flash else None
    # A piece a row: no architecture lets them see each other, so none is refused.
    model = load_language_model(
        source, dtype=wanted, device=device, attention=attention, packed=False
    )
    return Scorer(model, rule, batch_tokens=settings.batch_tokens)


def default_device() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


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
    document = int(np.searchsorted(tokens.starts, place, "right")) - 1
    name = json.dumps(names[document]) if names else str(document)
    raise NonFiniteLossError(
        f"the teacher's loss of token {place - tokens.starts[document]} of document {name} is "
        f"{losses[place]}, and {len(bad) - 1} more are like it: its dtype is too narrow (try "
        "--dtype float32), or its weights are damaged"
    )
