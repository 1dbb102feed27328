"""What a server is, found out before it is believed: its model, its version, its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.scoring.engines.completions import (
    DisprovedError,
    NonsenseError,
    read_losses,
    scoring_request,
)
from pipeline.scoring.engines.endpoints import Endpoint, Endpoints
from pipeline.scoring.engines.interface import EngineError

# Two servers of one model differ by what their kernels round: hundredths of a nat. Another model,
# or another quantization of it, differs by tenths and more.
_SAME_MODEL = 0.1


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself.

    Attributes:
        kind: "vllm", or "" where it does not say.
        version: of its program, "" where it does not say.
        max_length: tokens that it takes at once, the generated one included; None: not said.
    """

    kind: str
    version: str
    max_length: int | None

    def describe(self) -> str:
        """Return program and version, as far as they are known."""
        return f"{self.kind or 'a server'} {self.version or 'of unknown version'}"


def describe_server(endpoints: Endpoints, server: Endpoint) -> ServerInfo:
    """Return what a server says of itself; one attempt.

    Raises:
        PassingError: it can't be reached.
        EngineError: it serves other models.
    """
    model = endpoints.settings.model
    listed = endpoints.look(server, "/v1/models")
    models = listed.get("data") if isinstance(listed, Mapping) else None
    if not isinstance(models, list):
        raise EngineError(f"{server.url} lists no models: it is no server of the completions API")
    named = {str(entry.get("id")): entry for entry in models if isinstance(entry, Mapping)}
    if model not in named:
        raise EngineError(
            f'{server.url} serves {", ".join(map(repr, named)) or "nothing"}, not "{model}": name '
            "one of them with --model"
        )
    length = named[model].get("max_model_len")
    found = endpoints.look(server, "/version")
    version = found.get("version") if isinstance(found, Mapping) else None
    known = isinstance(version, str) or named[model].get("owned_by") == "vllm"
    return ServerInfo(
        kind="vllm" if known else "",
        version=version if isinstance(version, str) else "",
        max_length=length if isinstance(length, int) else None,
    )


def ask_losses(
    endpoints: Endpoints, server: Endpoint, input_ids: Sequence[int]
) -> NDArray[np.float32]:
    """Return a server's losses of a prompt, float32 [T], NaN at the first; one attempt.

    Raises:
        PassingError: asking again may help.
        NonsenseError: its answer is none to what was asked.
        EngineError: asking again can't help.
    """
    model = endpoints.settings.model
    answer = endpoints.post(server, "/v1/completions", scoring_request(model, input_ids))
    return read_losses(answer, model, input_ids)


def ask_first(endpoints: Endpoints, server: Endpoint, probe: Sequence[int]) -> NDArray[np.float32]:
    """Return what a job's first server gives a plain text, as `ask_losses`.

    Raises:
        PassingError: asking again may help.
        EngineError: it can't: the server gives no log-probabilities of a prompt.
    """
    try:
        return ask_losses(endpoints, server, probe)
    except NonsenseError as error:
        raise EngineError(
            f"{server.url} gives no log-probabilities of a prompt ({error}): serve the model with "
            "vLLM, which takes token ids and prompt_logprobs"
        ) from error


def require_same_program(info: ServerInfo, first: ServerInfo, where: str) -> None:
    """Check that a server is of the version that the job's scores are named after.

    Raises:
        DisprovedError: it is not.
    """
    if (info.kind, info.version) != (first.kind, first.version):
        raise DisprovedError(
            f"{where} is {info.describe()}, the job's scores are of {first.describe()}: their "
            "losses are not mixed; serve all with one version"
        )


def require_same_model(
    first: NDArray[np.float32], now: NDArray[np.float32], where: str, other: str
) -> None:
    """Check that two servers, or one at two times, give a text the same losses, but for rounding.

    Raises:
        DisprovedError: they don't.
    """
    difference = float(np.nanmean(np.abs(first - now)))
    if not difference <= _SAME_MODEL:
        raise DisprovedError(
            f"{where} gives a plain text losses that differ by {difference:.2f} nats a token from "
            f"{other}: it serves another model or quantization, or has gone wrong"
        )
