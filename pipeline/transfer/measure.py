"""Bits per byte of short texts, by a model's own logits."""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pipeline.drawing.progress import watched
from pipeline.models.weights import require_row
from pipeline.tokenization import Tokenizer


def context_of(tokenizer: Tokenizer) -> int:
    """Return the rows' token before a text, else BOS or EOS; ValueError without any."""
    around = tokenizer.around_text
    candidates = (around.first_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    found = next((token for token in candidates if token is not None), None)
    if found is None:
        raise ValueError(
            f"tokenizer {tokenizer.source} has no token that begins a text, nor one that ends it, "
            "so a text's first token would have no loss: give it a special token such as "
            "<|endoftext|>, as a copy of its file with one more in added_tokens"
        )
    return found


def text_logits(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    texts: Sequence[bytes],
    *,
    context: int,
    seq_length: int | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield a text's number, its token ids, int64 [n], and the logits before each, [n, V].

    `seq_length` tokens are read together, each time after `context`; None: as many as the model has
    positions for.

    Raises:
        ValueError: a text can't be tokenized, or has a token without a row.
    """
    batch = tokenizer.tokenize_batch(list(texts))
    if batch.failures:
        place, reason = next(iter(batch.failures.items()))
        raise ValueError(f"text {place} can't be tokenized by {tokenizer.source}: {reason}")
    largest = max(context, int(batch.input_ids.max(initial=0)))
    require_row(tokenizer.source, largest, len(cast(Any, model).get_input_embeddings().weight))
    width = seq_length or num_positions(model) - 1
    for place in range(len(texts)):
        own = batch.input_ids[slice(*batch.cu_tokens[place : place + 2])].tolist()
        for start in range(0, len(own), width):
            ids = torch.tensor([[context, *own[start : start + width]]], device=model.device)
            with torch.inference_mode():
                logits = cast(Any, model)(input_ids=ids, use_cache=False).logits[0, :-1]
            yield place, ids[0, 1:], logits


def num_positions(model: PreTrainedModel) -> int:
    """Return how many tokens a model was made for."""
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None) or sys.maxsize  # None: any number
    return most - max(positions_behind_padding(model).values(), default=-1) - 1


def positions_behind_padding(model: PreTrainedModel) -> dict[str, int]:
    """Return RoBERTa's kind of position embeddings by name, with the id behind which they begin."""
    return {
        name: padding
        for name, module in model.named_modules()
        if "position" in name and (padding := getattr(module, "padding_idx", None)) is not None
    }


def code_lengths(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    texts: Sequence[bytes],
    *,
    context: int,
    seq_length: int | None = None,
) -> list[float]:
    """Return the sum of each text's losses, in nats; arguments and errors as for `text_logits`."""
    found = [0.0] * len(texts)
    read = text_logits(model, tokenizer, texts, context=context, seq_length=seq_length)
    for place, ids, logits in read:
        found[place] += float(cross_entropy(logits.double(), ids, reduction="sum"))
    return found


def bits_per_byte(model: PreTrainedModel, tokenizer: Tokenizer, texts: Sequence[bytes]) -> float:
    """Return a model's mean code length of UTF-8 texts, in bits per byte.

    A text that is longer than the model's positions is read in parts.

    Raises:
        ValueError: there are no bytes, or as for `text_logits`.
    """
    num_bytes = sum(map(len, texts))
    if not num_bytes:
        raise ValueError("there is no text to measure on")
    context = context_of(tokenizer)
    watched_texts = watched(texts, "measuring", "texts")  # minutes of a CPU for a large model
    nats = [code_lengths(model, tokenizer, [text], context=context)[0] for text in watched_texts]
    return sum(nats) / math.log(2) / num_bytes
