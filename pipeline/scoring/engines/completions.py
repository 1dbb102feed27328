"""Questions to a server of the completions API, and their answers; no network.

Token ids go in, with `prompt_logprobs`, vLLM's extension; answers name tokens by id.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pipeline.command_line.failures import printable
from pipeline.scoring.engines.interface import EngineError
from schemas.distribution_rule import DistributionRule
from schemas.stored_distributions import LARGEST_MASS

# How far rounding a softmax may put a log-probability above 0.
_ROUNDING = 1e-4
# vLLM's value for minus infinity, which JSON lacks.
_IMPOSSIBLE = -9999.0
# This many tokens in a row never have the same log-probability, whatever the text: the first of a
# run of equal tokens is a surprise.
_NEVER_ALL_EQUAL = 16
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
# Most bytes of an answer without its tokens; of a token with spelling, rank and log-probability.
_OTHER_BYTES, _BYTES_PER_TOKEN = 1 << 20, 512
_SHOWN = 40
# The model's own distribution. vLLM takes what a request leaves out from the model's
# generation_config.json, and sampling may change its log-probabilities.
_UNCHANGED = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}


class NonsenseError(ValueError):
    """An answer that doesn't fit the question."""


class DisprovedError(EngineError):
    """A server isn't, or is no longer, the job's."""


class _Entry(msgspec.Struct):
    logprob: float


class _Generated(msgspec.Struct):
    top_logprobs: Annotated[list[dict[str, float]], Meta(min_length=1)]


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None]
    logprobs: _Generated | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=1)]
    model: str | None = None
    usage: _Usage | None = None


def question(model: str, input_ids: Sequence[int], rule: DistributionRule | None) -> dict[str, Any]:
    """Return the question about a prompt: losses, and a rule's likeliest tokens.

    One token is generated: servers refuse 0, and list what may follow the prompt only for it.
    """
    body = {"model": model, "prompt": list(input_ids), "max_tokens": 1} | _UNCHANGED
    if rule is None:
        return body | {"prompt_logprobs": 0}
    top = {"prompt_logprobs": rule.top_k, "logprobs": rule.top_k}
    return body | top | {"return_tokens_as_token_ids": True}


def most_bytes(input_ids: Sequence[int], rule: DistributionRule | None) -> int:
    """Return the longest acceptable answer about a prompt, in bytes."""
    tokens = 1 if rule is None else 1 + rule.top_k
    return _OTHER_BYTES + len(input_ids) * tokens * _BYTES_PER_TOKEN


def read_likeliest(
    answer: Any, input_ids: Sequence[int], rule: DistributionRule
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return a rule's K likeliest tokens after each of a prompt's T tokens.

    Ids and falling nats, [T, K], -inf without a token. NonsenseError for too few tokens, tokens not
    named by id, or a mass above 1.
    """
    choice = msgspec.convert(answer, _Answer).choices[0]
    if choice.logprobs is None:
        raise NonsenseError("no logprobs of what follows the prompt")
    after = choice.logprobs.top_logprobs[0]
    found = [
        *({_token_id(token): entry.logprob for token, entry in (place or {}).items()}
          for place in choice.prompt_logprobs[1:]),
        {_token_id(token.removeprefix("token_id:")): value for token, value in after.items()},
    ]  # fmt: skip
    shape = len(input_ids), rule.top_k
    ids, log_probs = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
    for row, entries in enumerate(found):
        if len(entries) < rule.top_k:
            raise NonsenseError(f"{len(entries)} tokens after {row + 1}, not {rule.top_k}")
        # The prompt's own token comes on top of the likeliest.
        ranked = sorted((-value, token) for token, value in entries.items())[: rule.top_k]
        kept = [pair for pair in ranked if pair[1] < rule.vocab_size and -pair[0] > _IMPOSSIBLE]
        for place, (nats, token) in enumerate(kept):
            ids[row, place], log_probs[row, place] = token, -nats
    masses = np.exp(log_probs, dtype=np.float64).sum(axis=1)
    if len(masses) and not masses.max() <= LARGEST_MASS:
        raise NonsenseError(f"probabilities of one place add up to {masses.max():.3f}")
    return ids, log_probs


def read_losses(answer: Any, model: str, input_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the losses of a prompt's tokens, [T], nats; NaN for the first.

    NonsenseError if the answer doesn't fit the question or model; DisprovedError if all values are
    equal.

    Example:
        >>> choice = {"prompt_logprobs": [None, {"9": {"logprob": -2.0}}]}
        >>> read_losses({"choices": [choice]}, "t", [5, 9]).tolist()
        [nan, 2.0]
    """
    try:
        found = msgspec.convert(answer, _Answer)
    except msgspec.ValidationError as error:
        raise NonsenseError(f"no log-probabilities of the prompt: {error}") from error
    if found.model is not None and found.model != model:
        raise NonsenseError(f'it answered as model "{printable(found.model[:_SHOWN])}"')
    if found.usage and found.usage.prompt_tokens not in (None, len(input_ids)):
        raise NonsenseError(
            f"it read {found.usage.prompt_tokens} tokens, but {len(input_ids)} were sent"
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
            raise NonsenseError(f"place {place} has {entry.logprob}, which means an infinite loss")
        losses[place] = max(0.0, -entry.logprob)
    known = losses[1:]
    if len(known) >= _NEVER_ALL_EQUAL and (known == known[0]).all():
        raise DisprovedError(f"all {len(known)} log-probabilities are {0.0 - known[0]:g}")
    return losses


def _token_id(name: str) -> int:
    if not _TOKEN_ID.fullmatch(name):
        raise NonsenseError(f"a token is named {name[:_SHOWN]!r}, not by its id")
    return int(name)
