"""What is said to a server of the completions API, and what its answer means; no network here.

Three dialects give the one number a token that is stored, the best first:

- PROMPT_LOGPROBS: vLLM's extension. Token ids go in; each place of the answer names its token by
  id, so that an answer about other tokens can't pass.
- ECHO: the older completions API, which SGLang speaks: token ids go in, the prompt is echoed with
  its log-probabilities.
- ECHO_TEXT: the same where a server takes text alone, as llama-cpp-python's does. Its tokens of
  each text are asked for and must be ours.

One token is generated and thrown away: `max_tokens` 0 means "without end" to llama-cpp-python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
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
# Of the logits, so that a token is chosen whatever the others are.
_FORCING_BIAS = 100


class Dialect(StrEnum):
    """How a server is asked for the log-probabilities of a prompt."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    ECHO_TEXT = "echo text"


class NonsenseError(ValueError):
    """An answer that can't be one to what was asked."""


class DisprovedError(NonsenseError):
    """A server is not, or is no longer, what the job's scores are named after."""


def scoring_request(
    dialect: Dialect, model: str, input_ids: Sequence[int], text: str = ""
) -> dict[str, Any]:
    """Return the body of a request for the log-probabilities of a prompt.

    Args:
        dialect: of the server.
        model: its name there.
        input_ids: the prompt.
        text: the same prompt, for `ECHO_TEXT`.

    Example:
        >>> scoring_request(Dialect.PROMPT_LOGPROBS, "teacher", [5, 9])["prompt_logprobs"]
        0
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": text if dialect is Dialect.ECHO_TEXT else list(input_ids),
        "max_tokens": 1,
        "temperature": 1.0,
    }
    if dialect is Dialect.PROMPT_LOGPROBS:
        return body | {"prompt_logprobs": 0}
    # not 0: SGLang takes it for no wish
    return body | {"echo": True, "logprobs": 1}


def read_losses(
    dialect: Dialect, answer: Mapping[str, Any], model: str, input_ids: Sequence[int]
) -> NDArray[np.float32]:
    """Return the losses of a prompt's tokens, NaN where the answer has none.

    Args:
        dialect: in which it was asked.
        answer: to `scoring_request`.
        model: that was asked for.
        input_ids: the prompt.

    Returns:
        float32 [T], nats. The first token has no loss; to `ECHO_TEXT` the second may lack one,
        where the server has dropped BOS and left out what came first then.

    Raises:
        NonsenseError: another model, another number of tokens, positive log-probabilities, NaN.
        DisprovedError: the same value everywhere.

    Example:
        >>> choice = {"prompt_logprobs": [None, {"9": {"logprob": -2.0}}]}
        >>> read_losses(Dialect.PROMPT_LOGPROBS, {"choices": [choice]}, "t", [5, 9]).tolist()
        [nan, 2.0]
    """
    _require_model(answer, model)
    _require_count(answer, len(input_ids))
    choice = _only_choice(answer)
    if dialect is Dialect.PROMPT_LOGPROBS:
        values = _named_values(choice, input_ids)
    else:
        values = _echoed_values(answer, choice, len(input_ids))
    num_missing = 2 if dialect is Dialect.ECHO_TEXT else 1
    losses = _to_losses(values, num_missing)
    _require_varied(losses[num_missing:])
    return losses


def forcing_request(model: str, text: str, token_id: int) -> dict[str, Any]:
    """Return the body of a request that gives one token's log-probability after a text.

    The token is forced by a bias, which enters the choice and not the log-probability that
    llama-cpp-python reports; `pipeline.scoring.engines.handshake` checks that before it relies on
    it.
    """
    return {
        "model": model,
        "prompt": text,
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 1,
        "logit_bias": {str(token_id): _FORCING_BIAS},
    }


def read_forced_loss(answer: Mapping[str, Any], model: str) -> float:
    """Return the loss in the answer to `forcing_request`, nats.

    Raises:
        NonsenseError: no log-probability, or more than one.
    """
    _require_model(answer, model)
    values = _logprobs(_only_choice(answer))
    if len(values) != 1:
        raise NonsenseError(f"{len(values)} log-probabilities of one generated token")
    return float(_to_losses([None, *values], 1)[1])


def _require_model(answer: Mapping[str, Any], model: str) -> None:
    if not isinstance(answer, Mapping):
        raise NonsenseError(f"a {type(answer).__name__}, no JSON object")
    found = answer.get("model")
    if found is not None and found != model:
        raise NonsenseError(f'an answer of model "{found}"')


def _require_count(answer: Mapping[str, Any], num_tokens: int) -> None:
    counted = _usage(answer, "prompt_tokens")
    if counted is not None and counted != num_tokens:
        raise NonsenseError(f"it read {counted} tokens where {num_tokens} were sent")


def _usage(answer: Mapping[str, Any], name: str) -> int | None:
    found = (answer.get("usage") or {}).get(name)
    return found if isinstance(found, int) else None


def _only_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise NonsenseError("no answer to the one prompt (field choices)")
    return choices[0]


def _named_values(choice: Mapping[str, Any], input_ids: Sequence[int]) -> list[float | None]:
    """Return vLLM's log-probabilities: at each place a mapping from a token's id."""
    places = choice.get("prompt_logprobs")
    if not isinstance(places, list):
        raise NonsenseError("no prompt_logprobs")
    if len(places) != len(input_ids):
        raise NonsenseError(f"{len(places)} prompt_logprobs of {len(input_ids)} tokens")
    values: list[float | None] = [None]
    for place, (found, token_id) in enumerate(zip(places[1:], input_ids[1:], strict=True), 1):
        entry = (found or {}).get(str(token_id))
        if not isinstance(entry, Mapping):
            raise NonsenseError(f"place {place} has no log-probability of token {token_id}")
        values.append(entry.get("logprob"))
    return values


def _echoed_values(
    answer: Mapping[str, Any], choice: Mapping[str, Any], num_tokens: int
) -> list[float | None]:
    """Return the echoed prompt's log-probabilities, without what was generated after it."""
    values = _logprobs(choice)
    num_generated = _usage(answer, "completion_tokens")
    if num_generated is None:
        num_generated = 1
    echoed = values[: len(values) - num_generated]
    if len(echoed) == num_tokens - 1:
        # llama-cpp-python leaves BOS out of its echo, and the value of what is then the first
        echoed = [None, *echoed]
    if len(echoed) != num_tokens:
        raise NonsenseError(
            f"{len(values)} log-probabilities of {num_tokens} tokens and {num_generated} generated"
        )
    return echoed


def _logprobs(choice: Mapping[str, Any]) -> list[float | None]:
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(values, list):
        raise NonsenseError("no log-probabilities (field logprobs)")
    return values


def _require_varied(losses: NDArray[np.float32]) -> None:
    if len(losses) >= _NEVER_ALL_EQUAL and (losses == losses[0]).all():
        raise DisprovedError(f"all {len(losses)} log-probabilities are {0.0 - losses[0]:g}")


def _to_losses(values: Sequence[float | None], num_missing: int) -> NDArray[np.float32]:
    losses = np.full(len(values), np.nan, np.float32)
    for place, value in enumerate(values):
        if value is None and place < num_missing:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise NonsenseError(f"place {place} has {value!r} for a log-probability")
        if place and value > _ROUNDING:
            raise NonsenseError(f"place {place} has the positive log-probability {value}")
        if value <= _IMPOSSIBLE:
            raise NonsenseError(f"place {place} has {value}, which stands for an infinite loss")
        if place:
            losses[place] = max(0.0, -value)
    return losses
