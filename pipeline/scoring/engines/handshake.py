"""What a server is, found out before it is believed: its model, its version, its dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.scoring.engines.completions import (
    Dialect,
    DisprovedError,
    NonsenseError,
    forcing_request,
    read_forced_loss,
    read_losses,
    scoring_request,
)
from pipeline.scoring.engines.endpoints import (
    Endpoint,
    Endpoints,
    MissingError,
    PassingError,
    RefusedError,
)
from pipeline.scoring.engines.interface import EngineError
from pipeline.tokenization import Tokenizer

COMPLETIONS = "/v1/completions"

# Two servers of one model differ by what their kernels round: hundredths of a nat. Another model,
# or another quantization of it, differs by tenths and more.
_SAME_MODEL = 0.1
# llama-cpp-python's status for a prompt in token ids; where a server is at fault, 502 or 503 come.
_FAILED = 500
_TOKENIZE = (("/extras/tokenize", "input"), ("/tokenize", "content"))


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself.

    Attributes:
        kind: "vllm", "sglang", "llama-cpp-python", or "" where it does not say.
        version: of its program, "" where it does not say.
        max_length: tokens that it takes at once, the generated one included; None: not said.
    """

    kind: str
    version: str
    max_length: int | None

    def describe(self) -> str:
        """Return program and version, as far as they are known."""
        return f"{self.kind or 'a server'} {self.version or 'of unknown version'}"


@dataclass(frozen=True)
class Conversation:
    """How the servers are asked, settled once for all of them.

    Attributes:
        dialect: of the servers.
        model: its name there.
        prefix: text of the context token for `ECHO_TEXT`, "" where the server adds it itself.
        tokenize: path and field that give a server's tokens of a text, likewise.
    """

    dialect: Dialect
    model: str
    prefix: str = ""
    tokenize: tuple[str, str] = ("", "")


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
    kind, version = _find_version(endpoints, server, str(named[model].get("owned_by", "")))
    return ServerInfo(kind, version, length if isinstance(length, int) else None)


def settle_dialect(
    endpoints: Endpoints, server: Endpoint, probe: Sequence[int], tokenizer: Tokenizer
) -> Conversation:
    """Return how a server can be asked for losses: token ids rather than text.

    Args:
        endpoints: the servers.
        server: one of them.
        probe: context token and tokens of a plain text.
        tokenizer: the dataset's teacher's.

    Raises:
        EngineError: it can't, or its text tokens are others.
    """
    model = endpoints.settings.model
    reasons = []
    for dialect in (Dialect.PROMPT_LOGPROBS, Dialect.ECHO):
        reason = _try(endpoints, server, dialect, probe)
        if reason is None:
            return Conversation(dialect, model)
        reasons.append(f"{dialect}: {reason}")
    try:
        return endpoints.retry(lambda s: _settle_text(endpoints, s, probe, tokenizer), server)
    except (EngineError, NonsenseError) as error:
        reasons.append(f"{Dialect.ECHO_TEXT}: {error}")
    raise EngineError(
        f"{server.url} gives no log-probabilities of a prompt ({'; '.join(reasons)}): serve the "
        "model with vLLM, SGLang or llama-cpp-python (--logits_all true)"
    )


def text_of(conversation: Conversation, input_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return a prompt, context token first, as the text that a server takes instead of tokens.

    Raises:
        EngineError: the tokens start or end within a character.
    """
    data = b"".join(map(tokenizer.token_bytes, input_ids[1:]))
    try:
        return conversation.prefix + data.decode()
    except UnicodeDecodeError as error:
        raise EngineError(
            "a piece starts or ends within a character, and the server takes text alone: raise "
            "--seq-length so that the document is not split there, or serve the model with vLLM"
        ) from error


def require_same_tokens(
    endpoints: Endpoints,
    server: Endpoint,
    conversation: Conversation,
    text: str,
    input_ids: Sequence[int],
) -> None:
    """Check that a server's tokens of a text are ours.

    Raises:
        EngineError: they are others.
    """
    found = _tokens_of(endpoints, server, conversation.tokenize, text)
    if found == list(input_ids):
        return
    place = next(
        (n for n, (own, other) in enumerate(zip(input_ids, found, strict=False)) if own != other),
        min(len(found), len(input_ids)),
    )
    raise EngineError(
        f"the server makes {len(found)} tokens of it, the dataset has {len(input_ids)}, and token "
        f"{place} is the first that differs: a server that takes text alone must tokenize as the "
        "dataset does; serve the model with vLLM or SGLang, which take token ids"
    )


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


def ask_forced(endpoints: Endpoints, server: Endpoint, text: str, token_id: int) -> float:
    """Return the loss of one token after a text, nats, see `forcing_request`; one attempt."""
    model = endpoints.settings.model
    body = forcing_request(model, text, token_id)
    return read_forced_loss(endpoints.post(server, COMPLETIONS, body), model)


def _find_version(endpoints: Endpoints, server: Endpoint, owner: str) -> tuple[str, str]:
    """Return what program a server is, and its version."""
    for kind, path in (("vllm", "/version"), ("sglang", "/get_server_info")):
        found = endpoints.look(server, path)
        if isinstance(found, Mapping) and isinstance(found.get("version"), str):
            return owner if owner in ("vllm", "sglang") else kind, found["version"]
    described = endpoints.look(server, "/openapi.json")
    about = described.get("info") if isinstance(described, Mapping) else None
    if isinstance(about, Mapping) and "llama.cpp Python" in str(about.get("title")):
        return "llama-cpp-python", str(about.get("version", ""))
    return owner if owner in ("vllm", "sglang", "llamacpp") else "", ""


def _try(
    endpoints: Endpoints, server: Endpoint, dialect: Dialect, probe: Sequence[int]
) -> str | None:
    """Return why a server does not speak a dialect, None where it does."""
    model = endpoints.settings.model
    body = scoring_request(dialect, model, probe)

    def ask(server: Endpoint) -> str | None:
        try:
            answer = endpoints.post(server, COMPLETIONS, body)
        except PassingError as error:
            if error.status != _FAILED:
                raise
            return str(error)
        try:
            read_losses(dialect, answer, model, probe)
        except NonsenseError as error:
            return str(error)
        return None

    try:
        return endpoints.retry(ask, server)
    except RefusedError as error:
        return str(error)


def _settle_text(
    endpoints: Endpoints, server: Endpoint, probe: Sequence[int], tokenizer: Tokenizer
) -> Conversation:
    """Return how a server that takes text alone is asked, once what it says has been checked.

    Raises:
        EngineError: it can't be asked so.
    """
    model = endpoints.settings.model
    text = b"".join(map(tokenizer.token_bytes, probe[1:])).decode()
    for tokenize in _TOKENIZE:
        for prefix in (tokenizer.token_name(probe[0]), ""):
            conversation = Conversation(Dialect.ECHO_TEXT, model, prefix, tokenize)
            if _tokens_of(endpoints, server, tokenize, prefix + text) == list(probe):
                _require_in_place(endpoints, server, conversation, probe, tokenizer)
                return conversation
    raise EngineError(
        "it takes text alone, and its tokens of a plain text are not the dataset's teacher's with "
        f"token {probe[0]} before it, or it does not tell them"
    )


def _require_in_place(
    endpoints: Endpoints,
    server: Endpoint,
    conversation: Conversation,
    probe: Sequence[int],
    tokenizer: Tokenizer,
) -> None:
    """Check that an echoed value is its own token's: forced to follow the same text, it has it.

    llama-cpp-python 0.3 gives each token the value of the next place where no BOS stands first.

    Raises:
        EngineError: it is not.
    """
    place = min(4, len(probe) - 1)
    text = text_of(conversation, probe, tokenizer)
    body = scoring_request(Dialect.ECHO_TEXT, conversation.model, probe, text)
    answer = endpoints.post(server, COMPLETIONS, body)
    echoed = read_losses(Dialect.ECHO_TEXT, answer, conversation.model, probe)
    before = text_of(conversation, probe[:place], tokenizer)
    forced = ask_forced(endpoints, server, before, probe[place])
    if abs(forced - float(echoed[place])) > _SAME_MODEL + 0.02 * forced:
        raise EngineError(
            f"token {place} of a plain text has the loss {echoed[place]:.3f} in the echo and "
            f"{forced:.3f} where it is generated: its echo gives each token another's value, as "
            "llama-cpp-python's does where no BOS stands first; name the BOS token with "
            "--teacher-context, here and in training"
        )


def _tokens_of(
    endpoints: Endpoints, server: Endpoint, tokenize: tuple[str, str], text: str
) -> list[int]:
    """Return a server's tokens of a text, none where it does not tell; one attempt."""
    path, name = tokenize
    body: dict[str, Any] = {name: text, "model": endpoints.settings.model}
    if name == "content":
        body |= {"add_special": True, "parse_special": True}
    try:
        answer = endpoints.post(server, path, body)
    except MissingError:
        return []
    found = answer.get("tokens") if isinstance(answer, Mapping) else None
    return found if isinstance(found, list) else []
