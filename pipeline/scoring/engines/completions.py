"""What is said to a server of the completions API, and what its answer means; no network here.

Token ids go in, with `prompt_logprobs`, vLLM's extension of the API. Each place of the answer names
its token by id, so an answer about other tokens can't pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pipeline.scoring.engines.interface import EngineError

# Of a log-probability above 0: what rounding a softmax may leave.
_ROUNDING = 1e-4
# vLLM's stand-in for minus infinity, which JSON lacks.
_IMPOSSIBLE = -9999.0
# So many tokens in a row never have one and the same log-probability, whatever the text: the first
# of a run of equal tokens is a surprise.
_NEVER_ALL_EQUAL = 16


class NonsenseError(ValueError):
    """An answer that can't be one to what was asked."""


class DisprovedError(EngineError):
    """A server is not, or is no longer, what the job's scores are named after."""


class _Entry(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None]


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=1)]
    model: str | None = None
    usage: _Usage | None = None


def read_losses(answer: Any, model: str, input_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the losses of a prompt's tokens.

    Args:
        answer: of the server, as JSON gives it.
        model: that was asked for.
        input_ids: the prompt.

    Returns:
        float32 [T], nats; NaN for the first token, which has no loss.

    Raises:
        NonsenseError: no such answer, another model, another number of tokens, positive
            log-probabilities.
        DisprovedError: the same value everywhere.

    Example:
        >>> choice = {"prompt_logprobs": [None, {"9": {"logprob": -2.0}}]}
        >>> read_losses({"choices": [choice]}, "t", [5, 9]).tolist()
        [nan, 2.0]
    """
    try:
        found = msgspec.convert(answer, _Answer)
    except msgspec.ValidationError as error:
        raise NonsenseError(f"no log-probabilities of the prompt: {error}") from error
    if found.model not in (None, model):
        raise NonsenseError(f'an answer of model "{found.model}"')
    if found.usage and found.usage.prompt_tokens not in (None, len(input_ids)):
        raise NonsenseError(
            f"it read {found.usage.prompt_tokens} tokens where {len(input_ids)} were sent"
        )
    places = found.choices[0].prompt_logprobs
    if len(places) != len(input_ids):
        raise NonsenseError(f"{len(places)} prompt_logprobs of {len(input_ids)} tokens")
    losses = np.full(len(input_ids), np.nan, np.float32)
    for place, (entries, token_id) in enumerate(zip(places[1:], input_ids[1:], strict=True), 1):
        entry = (entries or {}).get(str(token_id))
        if entry is None:
            raise NonsenseError(f"place {place} has no log-probability of token {token_id}")
        if entry.logprob > _ROUNDING:
            raise NonsenseError(f"place {place} has the positive log-probability {entry.logprob}")
        if entry.logprob <= _IMPOSSIBLE:
            raise NonsenseError(
                f"place {place} has {entry.logprob}, which stands for an infinite loss"
            )
        losses[place] = max(0.0, -entry.logprob)
    known = losses[1:]
    if len(known) >= _NEVER_ALL_EQUAL and (known == known[0]).all():
        raise DisprovedError(f"all {len(known)} log-probabilities are {0.0 - known[0]:g}")
    return losses
