"""What is said to a server of the completions API, and what its answer means; no network here.

Token ids go in, with `prompt_logprobs`, vLLM's extension of the API. Each place of the answer names
its token by id, so an answer about other tokens can't pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Of a log-probability above 0: what rounding a softmax may leave.
_ROUNDING = 1e-4
# vLLM's stand-in for minus infinity, which JSON lacks.
_IMPOSSIBLE = -9999.0
# So many tokens in a row never have one and the same log-probability, whatever the text: the first
# of a run of equal tokens is a surprise.
_NEVER_ALL_EQUAL = 16


class NonsenseError(ValueError):
    """An answer that can't be one to what was asked."""


class DisprovedError(NonsenseError):
    """A server is not, or is no longer, what the job's scores are named after."""


def scoring_request(model: str, input_ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request for the log-probabilities of a prompt.

    One token is generated and thrown away: servers refuse 0.

    Args:
        model: its name at the server.
        input_ids: the prompt.

    Example:
        >>> scoring_request("teacher", [5, 9])["prompt_logprobs"]
        0
    """
    return {
        "model": model,
        "prompt": list(input_ids),
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
    }


def read_losses(
    answer: Mapping[str, Any], model: str, input_ids: Sequence[int]
) -> NDArray[np.float32]:
    """Return the losses of a prompt's tokens.

    Args:
        answer: to `scoring_request`.
        model: that was asked for.
        input_ids: the prompt.

    Returns:
        float32 [T], nats; NaN for the first token, which has no loss.

    Raises:
        NonsenseError: another model, another number of tokens, positive log-probabilities, NaN.
        DisprovedError: the same value everywhere.

    Example:
        >>> choice = {"prompt_logprobs": [None, {"9": {"logprob": -2.0}}]}
        >>> read_losses({"choices": [choice]}, "t", [5, 9]).tolist()
        [nan, 2.0]
    """
    _require_model(answer, model)
    _require_count(answer, len(input_ids))
    losses = _to_losses(_named_values(_only_choice(answer), input_ids))
    _require_varied(losses[1:])
    return losses


def _require_model(answer: Mapping[str, Any], model: str) -> None:
    if not isinstance(answer, Mapping):
        raise NonsenseError(f"a {type(answer).__name__}, no JSON object")
    found = answer.get("model")
    if found is not None and found != model:
        raise NonsenseError(f'an answer of model "{found}"')


def _require_count(answer: Mapping[str, Any], num_tokens: int) -> None:
    counted = (answer.get("usage") or {}).get("prompt_tokens")
    if counted is not None and counted != num_tokens:
        raise NonsenseError(f"it read {counted} tokens where {num_tokens} were sent")


def _only_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise NonsenseError("no answer to the one prompt (field choices)")
    return choices[0]


def _named_values(choice: Mapping[str, Any], input_ids: Sequence[int]) -> list[Any]:
    """Return the log-probabilities of all tokens but the first, each found by its token's id."""
    places = choice.get("prompt_logprobs")
    if not isinstance(places, list):
        raise NonsenseError("no prompt_logprobs")
    if len(places) != len(input_ids):
        raise NonsenseError(f"{len(places)} prompt_logprobs of {len(input_ids)} tokens")
    values = []
    for place, (found, token_id) in enumerate(zip(places[1:], input_ids[1:], strict=True), 1):
        entry = (found or {}).get(str(token_id))
        if not isinstance(entry, Mapping):
            raise NonsenseError(f"place {place} has no log-probability of token {token_id}")
        values.append(entry.get("logprob"))
    return values


def _require_varied(losses: NDArray[np.float32]) -> None:
    if len(losses) >= _NEVER_ALL_EQUAL and (losses == losses[0]).all():
        raise DisprovedError(f"all {len(losses)} log-probabilities are {0.0 - losses[0]:g}")


def _to_losses(values: Sequence[Any]) -> NDArray[np.float32]:
    """Return losses, NaN before the given log-probabilities' own."""
    losses = [math.nan]
    for place, value in enumerate(values, 1):
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise NonsenseError(f"place {place} has {value!r} for a log-probability")
        if value > _ROUNDING:
            raise NonsenseError(f"place {place} has the positive log-probability {value}")
        if value <= _IMPOSSIBLE:
            raise NonsenseError(f"place {place} has {value}, which stands for an infinite loss")
        losses.append(max(0.0, -value))
    return np.array(losses, np.float32)
