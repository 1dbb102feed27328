"""A served teacher gives the losses of the same model here, or none at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import open_dataset
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.completions import NonsenseError, read_losses
from pipeline.scoring.engines.endpoints import Endpoints, base_url
from pipeline.scoring.engines.engine_settings import Handshake, ServedSettings
from pipeline.scoring.engines.interface import EngineError
from pipeline.scoring.engines.openai import ServedEngine, connect
from pipeline.scoring.engines.transformers import load_scorer
from pipeline.scoring.sidecars import ShardToScore
from tests.support.completions_server import (
    MODEL,
    CompletionsServer,
    Fault,
    constant,
    off,
    right,
    serve,
    zeros,
)
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model
from tests.support.scored_data import SEQ_LENGTH


@pytest.fixture
def server(world: Path) -> Iterator[CompletionsServer]:
    with serve(world / "teacher") as running:
        yield running


def settings_of(*servers: CompletionsServer, **more: Any) -> ServedSettings:
    return ServedSettings(tuple(s.url for s in servers), MODEL, concurrency=4, **more)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.scoring.engines.endpoints.FIRST_WAIT", 0.001)


def rule_of(world: Path) -> ContextRule:
    manifest = open_dataset(str(world / "data")).manifest
    return ContextRule.of_rows(PackingRules.of_dataset(manifest, seq_length=SEQ_LENGTH))


def ask(
    world: Path, *servers: CompletionsServer, known: Handshake | None = None, **more: Any
) -> ServedEngine:
    dataset = open_dataset(world / "data")
    return connect(settings_of(*servers, **more), rule_of(world), dataset=dataset, known=known)


def score(engine: Any, world: Path) -> np.ndarray[Any, Any]:
    """Return the losses of the first shard."""
    own = ShardToScore.open(select_documents(open_dataset(world / "data")), 0, engine.rule)
    losses: np.ndarray[Any, Any] = engine.score(
        own.read_tokens(), own.pieces, names=own.index.document_id
    ).losses
    return losses


@pytest.fixture(scope="module")
def own(world: Path) -> np.ndarray[Any, Any]:
    """The losses of the same model here."""
    rule = rule_of(world)
    return score(load_scorer(str(world / "teacher"), rule, dtype="float32"), world)


def require_own(found: np.ndarray[Any, Any], own: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found, own, rtol=0, atol=2e-5)


def test_a_served_model_gives_its_own_losses(
    world: Path, server: CompletionsServer, own: np.ndarray[Any, Any]
) -> None:
    engine = ask(world, server)
    require_own(score(engine, world), own)
    assert (engine.handshake.program, engine.handshake.version) == ("vllm", "0.20.2")
    assert len(own) > 500
    assert all(isinstance(body["prompt"], list) for body in server.bodies), "token ids, not text"
    # What vLLM's ModelConfig.get_diff_sampling_param takes for what a request leaves out.
    neutral = {"repetition_penalty": 1, "temperature": 1, "top_k": -1, "top_p": 1, "min_p": 0}
    assert all(body | neutral == body for body in server.bodies)


def changed(place: int, entry: dict[str, Any] | None = None, **value: float) -> Fault:
    """Return a fault of one place: another entry, or another value of its own."""

    def fault(answer: dict[str, Any]) -> dict[str, Any]:
        places = answer["choices"][0]["prompt_logprobs"]
        places[place] = entry or dict.fromkeys(places[place], value)
        return answer

    return fault


def wrong_length(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


NONSENSE: dict[str, Fault] = {
    "place 3 has the positive log-probability 0.5": changed(3, logprob=0.5),
    "place 3 has -9999.0, which means an inf": changed(3, logprob=-9999.0),  # vLLM's
    r"\d+ prompt_logprobs of \d+ tokens": wrong_length,
    "place 2 has no log-probability of token": changed(2, {"479000": {"logprob": -1.0}}),
    'it answered as model "another"': lambda answer: answer | {"model": "another"},
    "it read 7 tokens, but": lambda answer: answer | {"usage": {"prompt_tokens": 7}},
    "missing required field `choices`": lambda answer: {"model": MODEL},
}
BROKEN: dict[str, Fault] = {
    "not JSON": changed(3, logprob=float("nan")),
    "status 503: as ordered": lambda answer: 503,
    "status 429: as ordered": lambda answer: 429,
    "RemoteProtocolError|ReadError": lambda answer: None,
}


@pytest.mark.parametrize("message", NONSENSE)
def test_an_answer_that_can_t_be_one_is_named(message: str) -> None:
    places = [None, *({str(n): {"logprob": -float(n)}} for n in range(1, 6))]
    answer = {"model": MODEL, "choices": [{"prompt_logprobs": places}]}
    assert read_losses(answer, MODEL, range(6))[1:].tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(NonsenseError, match=message):
        read_losses(NONSENSE[message](answer), MODEL, range(6))


def test_faults_that_pass_change_nothing(
    world: Path, server: CompletionsServer, own: np.ndarray[Any, Any]
) -> None:
    engine = ask(world, server, attempts=40)
    server.faults = [*NONSENSE.values(), *BROKEN.values()] * 2
    require_own(score(engine, world), own)
    assert not server.faults


@pytest.mark.parametrize("message", [*BROKEN, r"\d+ prompt_logprobs of \d+ tokens"])
def test_a_fault_that_stays_ends_with_what_it_is(
    world: Path, server: CompletionsServer, message: str
) -> None:
    engine = ask(world, server, attempts=3)
    server.faults = [(NONSENSE | BROKEN)[message]] * 10_000
    with pytest.raises(
        EngineError,
        match=rf'document ".*": http://127.*gave no usable answer in 3 attempts.*({message})',
    ):
        score(engine, world)


def test_a_request_that_is_refused_is_not_asked_again(
    world: Path, server: CompletionsServer
) -> None:
    engine = ask(world, server)
    before = len(server.bodies)
    server.faults = [lambda answer: 400] * 1000
    with pytest.raises(EngineError, match="refuses the request with status 400: as ordered"):
        score(engine, world)
    assert len(server.bodies) - before < 100
    server.faults = []
    assert len(score(engine, world)), "an engine can be asked again"


def test_two_servers_share_the_work_and_one_that_dies_is_left_out(
    world: Path, server: CompletionsServer, own: np.ndarray[Any, Any]
) -> None:
    with serve(world / "teacher") as second:
        engine = ask(world, server, second)
        counted = len(server.bodies), len(second.bodies)
        losses = score(engine, world)
        shares = len(server.bodies) - counted[0], len(second.bodies) - counted[1]
    assert min(shares) > 0
    require_own(losses, own)
    again = score(engine, world)  # the second is gone
    np.testing.assert_array_equal(again, losses)


@pytest.mark.parametrize("change", ["model", "version"])
def test_servers_that_differ_are_refused_whenever_they_show(
    world: Path, server: CompletionsServer, tmp_path: Path, change: str
) -> None:
    """Beside the first one, in a worker that comes later, and when one comes back."""
    write_model(tmp_path / "other", byte_level(480), seed=9)
    folder, version, message = {
        "model": (tmp_path / "other", "0.20.2", "it serves another model or quantization"),
        "version": (world / "teacher", "0.21.0", "is vllm 0.21.0, the job's scores are from vllm"),
    }[change]
    engine = ask(world, server, attempts=3)
    assert ask(world, server, known=engine.handshake).handshake is engine.handshake
    with serve(folder, version=version) as second:
        with pytest.raises(EngineError, match=message):
            ask(world, server, second, attempts=2)
        with pytest.raises(EngineError, match=message):
            ask(world, second, known=engine.handshake)
        server.faults = [lambda answer: 503]
        server.model, server.version = second.model, second.version
        with pytest.raises(EngineError, match=message):
            score(engine, world)


@pytest.mark.parametrize(
    ("wrong", "num_right", "message"),
    [
        (zeros, 0, r"all \d+ log-probabilities are 0"),
        (constant, 7, r"all \d+ log-probabilities are -2\.5"),
        (off, 0, r"a plain text that differ by 3\.00 nats a token from those at the start"),
        (off, 30, r"a plain text that differ by 3\.00 nats a token from those at the start"),
    ],
)
def test_a_server_that_goes_wrong_after_the_handshake_is_not_believed(
    world: Path, server: CompletionsServer, wrong: Any, num_right: int, message: str
) -> None:
    engine = ask(world, server, attempts=2)
    server.faults = [right] * num_right + [wrong] * 10_000
    with pytest.raises(EngineError, match=message):
        score(engine, world)


@pytest.mark.parametrize(("num_wrong", "interval"), [(10_000, 256), (20, 4)])
def test_what_a_server_gave_before_it_went_wrong_is_asked_of_another(
    world: Path,
    server: CompletionsServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    own: np.ndarray[Any, Any],
    num_wrong: int,
    interval: int,
) -> None:
    """Found out at the end, or by an interval although it recovers; which were right is unknown."""
    monkeypatch.setattr("pipeline.scoring.engines.endpoints.PROOF_INTERVAL", interval)
    with serve(world / "teacher") as second:
        engine = ask(world, server, second)
        second.faults = [right] * 3 + [off] * num_wrong
        losses = score(engine, world)
        assert len(second.faults) < num_wrong
    require_own(losses, own)
    assert f"asking again for what {second.url} gave: {second.url} gives losses" in caplog.text


def test_servers_that_can_t_be_asked_are_refused(world: Path, server: CompletionsServer) -> None:
    for settings, message in (
        (replace(settings_of(server), model="other"), "serves 'served', not \"other\""),
        (
            replace(settings_of(server, attempts=2), endpoint=("http://127.0.0.1:9",)),
            "no usable answer in 2 attempts.*ConnectError",
        ),
    ):
        with pytest.raises(EngineError, match=message):
            connect(settings, rule_of(world), dataset=open_dataset(world / "data"))
    server.max_model_len = 20
    with pytest.raises(EngineError, match=r"takes 20 tokens at once, a piece may have \d+ and one"):
        ask(world, server)


@pytest.mark.parametrize(
    "url",
    ["gpu-7:8000", "http://localhost:80a0", "http://ü..x:80", "http://a\nb:8", "http://[::1:8"],
)
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(EngineError, match=r"endpoint=.* isn't a URL such as http://localhost:8000"):
        base_url(url)


@pytest.mark.parametrize("found", ["another name", "no list", "a shorter context"])
def test_a_server_that_comes_back_as_another_gets_no_more_requests(
    world: Path,
    server: CompletionsServer,
    own: np.ndarray[Any, Any],
    found: str,
) -> None:
    """It ended the job, in the middle of a shard."""
    models: dict[str, Any] = {
        "another name": {"data": [{"id": "other"}]},
        "no list": 404,
        "a shorter context": {"data": [{"id": MODEL, "max_model_len": 20}]},
    }
    with serve(world / "teacher") as second:
        engine = ask(world, server, second)
        second.faults = [lambda _: 503]
        second.get = lambda path: (
            models[found] if path == "/v1/models" else {"version": second.version}
        )
        require_own(score(engine, world), own)
    assert engine.endpoints.servers[1].disproof


def test_a_server_without_prompt_logprobs_is_refused_at_once(
    world: Path, server: CompletionsServer
) -> None:
    def echo(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0].pop("prompt_logprobs")
        return answer

    server.faults = [echo]
    refusal = r"of a prompt \(.* required field `prompt_logprobs`.*\): serve .* with vLLM"
    with pytest.raises(EngineError, match=refusal):
        ask(world, server)
    assert len(server.bodies) == 1


def test_a_key_opens_a_server(world: Path, server: CompletionsServer) -> None:
    server.key = "secret"
    with pytest.raises(EngineError, match=r"status 401.*set VOCAG_API_KEY"):
        ask(world, server)
    with pytest.raises(EngineError, match="VOCAG_API_KEY has a letter beyond ASCII"):
        Endpoints(settings_of(server), api_key="ké€y")
    dataset = open_dataset(world / "data")
    engine = connect(settings_of(server), rule_of(world), dataset=dataset, api_key="secret")
    assert not np.isnan(engine.handshake.losses[1:]).any()
