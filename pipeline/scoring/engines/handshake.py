"""Check a server before use: its model, its version, its losses."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.scoring.engines.completions import (
    DisprovedError,
    most_bytes,
    question,
    read_likeliest,
    read_losses,
)
from pipeline.scoring.engines.endpoints import Endpoint, Endpoints
from pipeline.scoring.engines.engine_settings import Handshake
from pipeline.scoring.engines.interface import EngineError
from schemas.distribution_rule import DistributionRule

# Nats a token: one model's kernels differ by hundredths; another model or quantization by tenths
# and more.
_SAME_MODEL = 0.1
# Of a place's mass; rounding moves a few hundredths.
_SAME_MASS = 0.1
# A version becomes part of the names of scores, and is printed.
_VERSION = re.compile(r"[\w.+!-]{0,100}", re.ASCII)
# Characters of a model's name, and number of names.
_SHOWN, _MOST_SHOWN = 200, 20


def shake_hands(
    endpoints: Endpoints,
    server: Endpoint,
    probe: Sequence[int],
    *,
    length: int,
    rule: DistributionRule | None,
) -> Handshake:
    """Return a server's program, version and losses of the plain text `probe`; one attempt.

    DisprovedError if it serves other models, takes fewer than `length` tokens, or alters the
    distribution after a prompt: another server may not. Else as in `ask`.
    """
    model = endpoints.settings.model
    listed = endpoints.send(server, "/v1/models")
    models = listed.get("data") if isinstance(listed, Mapping) else None
    if not isinstance(models, list):
        raise DisprovedError(
            f"{server.url} lists no models: it isn't a server of the completions API"
        )
    named = {str(entry.get("id")): entry for entry in models if isinstance(entry, Mapping)}
    if model not in named:
        raise DisprovedError(
            f'{server.url} serves {_describe(named) or "nothing"}, not "{model}": name one of them '
            "with model="
        )
    most = named[model].get("max_model_len")
    if isinstance(most, int) and most < length + 1:
        raise DisprovedError(
            f"{server.url} takes {most} tokens at once, a piece may have {length} and one is "
            "generated after it: serve the model with a longer context (vLLM: --max-model-len), or "
            "lower teacher_seq_length"
        )
    answer = ask(endpoints, server, probe, rule)
    if rule is not None:
        _require_raw(answer, ask(endpoints, server, probe[:-1], rule), server.url)
    found = endpoints.send(server, "/version")
    version = found.get("version") if isinstance(found, Mapping) else None
    is_vllm = isinstance(version, str) or named[model].get("owned_by") == "vllm"
    version = version if isinstance(version, str) else ""
    if not _VERSION.fullmatch(version):
        raise DisprovedError(
            f"{server.url} says that its version is {version[:_SHOWN]!r}, which scores can't be "
            "named after"
        )
    return Handshake("vllm" if is_vllm else "", version, tuple(answer.losses.tolist()))


class Answer(NamedTuple):
    """A server's losses of a prompt's T tokens, nats, NaN for the first.

    If requested, also the likeliest tokens after each, [T, K], and their nats.
    """

    losses: NDArray[np.float32]
    ids: NDArray[np.int64] | None = None
    log_probs: NDArray[np.float32] | None = None


def ask(
    endpoints: Endpoints, server: Endpoint, input_ids: Sequence[int], rule: DistributionRule | None
) -> Answer:
    """Return a server's answer to a prompt; one attempt.

    Errors as in `Endpoints.send`; NonsenseError also if the answer doesn't fit.
    """
    model = endpoints.settings.model
    try:
        answer = endpoints.send(
            server,
            "/v1/completions",
            question(model, input_ids, rule),
            most_bytes=most_bytes(input_ids, rule),
        )
    except EngineError as error:
        if rule is None:
            raise
        raise EngineError(
            f"{error}; {rule.top_k} log-probabilities a token were asked for: serve the model with "
            f"as many (vLLM: --max-logprobs {rule.top_k}), or lower top_k"
        ) from error
    losses = read_losses(answer, model, input_ids)
    likeliest = () if rule is None else read_likeliest(answer, input_ids, rule)
    return Answer(losses, *likeliest)


def _describe(models: Iterable[str]) -> str:
    names = [repr(name[:_SHOWN]) for name in models]
    more = [f"and {len(names) - _MOST_SHOWN} more"] * (len(names) > _MOST_SHOWN)
    return ", ".join(names[:_MOST_SHOWN] + more)


def _require_raw(whole: Answer, cut: Answer, at: str) -> None:
    """Check that sampling doesn't alter the distribution after a prompt.

    The server reports one place twice: within a text, and after it.
    """
    (one, other), moved, rest = (_probs(whole, -2), _probs(cut, -1)), 0.0, 0.0
    for token in one | other:
        # A token that a side doesn't list is at most as likely there as the last one listed.
        first = one.get(token, min(*one.values(), other.get(token, 0.0)))
        change = other.get(token, min(*other.values(), first)) - first
        moved, rest = moved + abs(change) / 2, rest + change / 2
    if not moved + abs(rest) <= _SAME_MASS:
        raise DisprovedError(
            f"{at} puts {moved + abs(rest):.2f} of the mass elsewhere after a prompt than at "
            "the same place in a text: sampling has changed these log-probabilities. Serve the "
            "model with raw ones (vLLM: --logprobs-mode raw_logprobs), and without logits "
            "processors and penalties of its own"
        )


def _probs(answer: Answer, place: int) -> dict[int, float]:
    assert answer.ids is not None
    assert answer.log_probs is not None
    probs = np.exp(answer.log_probs[place]).tolist()
    return dict(zip(answer.ids[place].tolist(), probs, strict=True))


def require_same_teacher(first: Handshake, now: Handshake, at: str) -> None:
    """Check that a server is the job's first: program, version and losses; else DisprovedError."""
    if (first.program, first.version) != (now.program, now.version):
        raise DisprovedError(
            f"{at} is {now.describe()}, the job's scores are from {first.describe()}, and their "
            "losses must not be mixed: serve all with one version"
        )
    difference = float(np.nanmean(np.abs(np.subtract(first.losses, now.losses))))
    if not difference <= _SAME_MODEL:
        raise DisprovedError(
            f"{at} gives losses of a plain text that differ by {difference:.2f} nats a token "
            "from those at the start: it serves another model or quantization, or is broken"
        )
