"""A served teacher gives the losses of the same model here, or none at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.dataset.files import open_dataset
from pipeline.dataset.selection import select_documents
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.endpoints import base_url
from pipeline.scoring.engines.handshake import Handshake
from pipeline.scoring.engines.interface import EngineError
from pipeline.scoring.engines.openai import ServedEngine, connect
from pipeline.scoring.engines.settings import ServedSettings
from pipeline.scoring.engines.transformers import load_scorer
from pipeline.scoring.sidecars import DocumentTokens, ShardToScore
from tests.support.completions_server import (
    MODEL,
    CompletionsServer,
    constant,
    off,
    right,
    serve,
    zeros,
)
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model
from tests.support.scored_data import SEQ_LENGTH, retrain, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


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


def score(
    engine: Any, world: Path, rule: ContextRule, shard: int = 0
) -> tuple[np.ndarray[Any, Any], DocumentTokens]:
    own = ShardToScore.open(select_documents(open_dataset(world / "data")), shard, rule)
    tokens = own.read_tokens()
    return engine.score(tokens, own.pieces, names=own.index.document_id).losses, tokens


def own_losses(world: Path, rule: ContextRule) -> np.ndarray[Any, Any]:
    return score(load_scorer(str(world / "teacher"), rule, dtype="float32"), world, rule)[0]


def test_a_served_model_gives_its_own_losses(world: Path, server: CompletionsServer) -> None:
    rule = rule_of(world)
    engine = ask(world, server)
    losses, _ = score(engine, world, rule)
    assert (engine.handshake.program, engine.handshake.version) == ("vllm", "0.20.2")
    np.testing.assert_allclose(losses, own_losses(world, rule), rtol=0, atol=2e-5)
    assert len(losses) > 500
    assert all(isinstance(body["prompt"], list) for body in server.bodies), "token ids, not text"


def wrong_length(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


def positive(answer: dict[str, Any]) -> dict[str, Any]:
    for entry in answer["choices"][0]["prompt_logprobs"][3].values():
        entry["logprob"] = 0.5
    return answer


def nan(answer: dict[str, Any]) -> dict[str, Any]:
    for entry in answer["choices"][0]["prompt_logprobs"][3].values():
        entry["logprob"] = float("nan")
    return answer


def infinite(answer: dict[str, Any]) -> dict[str, Any]:
    for entry in answer["choices"][0]["prompt_logprobs"][3].values():
        entry["logprob"] = -9999.0  # what vLLM writes
    return answer


def other_tokens(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["prompt_logprobs"][2] = {"479000": {"logprob": -1.0}}
    return answer


FAULTS = {
    "no JSON": nan,
    "has the positive log-probability 0.5": positive,
    "place 3 has -9999.0, which stands for an infinite loss": infinite,
    r"\d+ prompt_logprobs of \d+ tokens": wrong_length,
    "place 2 has no log-probability of token": other_tokens,
    'an answer of model "another"': lambda answer: answer | {"model": "another"},
    "status 503: as ordered": lambda answer: 503,
    "status 429: as ordered": lambda answer: 429,
    "RemoteProtocolError|ReadError": lambda answer: None,
    "missing required field `choices`": lambda answer: {"model": MODEL},
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_that_passes_changes_nothing(
    world: Path, server: CompletionsServer, message: str
) -> None:
    rule = rule_of(world)
    engine = ask(world, server)
    server.faults = [FAULTS[message]] * 3
    losses, _ = score(engine, world, rule)
    assert not server.faults
    np.testing.assert_allclose(losses, own_losses(world, rule), rtol=0, atol=2e-5)


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_that_stays_ends_with_what_it_is(
    world: Path, server: CompletionsServer, message: str
) -> None:
    engine = ask(world, server, attempts=3)
    server.faults = [FAULTS[message]] * 10_000
    with pytest.raises(
        EngineError,
        match=rf'document ".*": http://127.*gave no usable answer in 3 attempts.*({message})',
    ):
        score(engine, world, rule_of(world))


def test_a_request_that_is_refused_is_not_asked_again(
    world: Path, server: CompletionsServer
) -> None:
    engine = ask(world, server)
    before = len(server.bodies)
    server.faults = [lambda answer: 400] * 1000
    with pytest.raises(EngineError, match="refuses the request with status 400: as ordered"):
        score(engine, world, rule_of(world))
    assert len(server.bodies) - before < 100
    server.faults = []
    assert len(score(engine, world, rule_of(world))[0]), "an engine can be asked again"


def test_two_servers_share_the_work_and_one_that_dies_is_left_out(
    world: Path, server: CompletionsServer
) -> None:
    rule = rule_of(world)
    with serve(world / "teacher") as second:
        engine = ask(world, server, second)
        counted = len(server.bodies), len(second.bodies)
        losses, _ = score(engine, world, rule)
        shares = len(server.bodies) - counted[0], len(second.bodies) - counted[1]
    assert min(shares) > 0
    np.testing.assert_allclose(losses, own_losses(world, rule), rtol=0, atol=2e-5)
    again, _ = score(engine, world, rule)  # the second is gone
    np.testing.assert_array_equal(again, losses)


def test_servers_of_different_models_are_refused(
    world: Path, server: CompletionsServer, tmp_path: Path
) -> None:
    write_model(tmp_path / "other", byte_level(480), seed=9)
    refusal = pytest.raises(EngineError, match=r"it serves another model or quantization")
    with serve(tmp_path / "other") as second, refusal:
        ask(world, server, second, attempts=2)


def test_a_server_that_comes_back_with_another_model_is_not_believed(
    world: Path, server: CompletionsServer, tmp_path: Path
) -> None:
    engine = ask(world, server, attempts=3)
    write_model(tmp_path / "other", byte_level(480), seed=9)
    with serve(tmp_path / "other") as second:
        server.faults = [lambda answer: 503]
        server.model = second.model
        with pytest.raises(EngineError, match=r"it serves another model or quantization"):
            score(engine, world, rule_of(world))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (zeros, r"all \d+ log-probabilities are 0"),
        (constant, r"all \d+ log-probabilities are -2\.5"),
        (off, r"a plain text losses that differ by 3\.00 nats a token from those the job started"),
    ],
)
@pytest.mark.parametrize("num_right", [0, 7, 30])
def test_a_server_that_goes_wrong_after_the_handshake_is_not_believed(
    world: Path, server: CompletionsServer, wrong: Any, message: str, num_right: int
) -> None:
    engine = ask(world, server, attempts=2)
    server.faults = [right] * num_right + [wrong] * 10_000
    with pytest.raises(EngineError, match=message):
        score(engine, world, rule_of(world))


def test_what_a_server_gave_before_it_went_wrong_is_asked_of_another(
    world: Path, server: CompletionsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found out at the end alone: which of its answers were right, nobody knows."""
    rule = rule_of(world)
    with serve(world / "teacher") as second:
        engine = ask(world, server, second)
        second.faults = [right] * 3 + [off] * 10_000
        losses, _ = score(engine, world, rule)
        assert len(second.faults) < 10_000
    np.testing.assert_allclose(losses, own_losses(world, rule), rtol=0, atol=2e-5)
    assert f"pieces are asked again: {second.url} gives a plain text losses" in caplog.text


def test_a_server_that_is_wrong_for_a_while_is_found_out_at_intervals(
    world: Path, server: CompletionsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = rule_of(world)
    engine = ask(world, server)
    monkeypatch.setattr("pipeline.scoring.engines.endpoints.PROOF_INTERVAL", 4)
    server.faults = [right] * 6 + [off] * 12
    losses, _ = score(engine, world, rule)
    assert not server.faults
    np.testing.assert_allclose(losses, own_losses(world, rule), rtol=0, atol=2e-5)


def test_a_worker_holds_servers_against_the_losses_that_the_job_started_with(
    world: Path, server: CompletionsServer
) -> None:
    known = ask(world, server).handshake
    assert ask(world, server, known=known).handshake is known
    server.faults = [off] * 10_000
    with pytest.raises(EngineError, match=r"differ by 3\.00 nats a token from those the job"):
        ask(world, server, known=known)


def test_servers_of_two_versions_are_refused(world: Path, server: CompletionsServer) -> None:
    refusal = r"is vllm 0.21.0, the job's scores are of vllm 0.20.2: their losses are not mixed"
    known = ask(world, server).handshake
    with serve(world / "teacher", version="0.21.0") as second:
        with pytest.raises(EngineError, match=refusal):
            ask(world, server, second)
        with pytest.raises(EngineError, match=refusal):
            ask(world, second, known=known)  # a worker that comes later than the launcher


def test_a_server_that_comes_back_in_another_version_is_not_believed(
    world: Path, server: CompletionsServer
) -> None:
    engine = ask(world, server, attempts=3)
    server.faults = [lambda answer: 503]
    server.version = "0.21.0"
    with pytest.raises(EngineError, match=r"is vllm 0.21.0, the job's scores are of vllm 0.20.2"):
        score(engine, world, rule_of(world))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 20}, r"takes 20 tokens at once, a piece may have \d+ and one is"),
        ({"key": "secret"}, r"status 401.*set VOCAG_API_KEY"),
    ],
)
def test_a_server_that_can_t_be_asked_is_refused(
    world: Path, options: dict[str, Any], message: str
) -> None:
    with serve(world / "teacher", **options) as server, pytest.raises(EngineError, match=message):
        ask(world, server)


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


def test_a_key_opens_a_server(world: Path) -> None:
    dataset = open_dataset(world / "data")
    with serve(world / "teacher", key="secret") as server:
        engine = connect(settings_of(server), rule_of(world), dataset=dataset, api_key="secret")
    assert not np.isnan(engine.handshake.losses[1:]).any()


def test_another_name_and_no_server_at_all_are_refused(
    world: Path, server: CompletionsServer
) -> None:
    other = replace(settings_of(server), model="other")
    with pytest.raises(EngineError, match="serves 'served', not \"other\""):
        connect(other, rule_of(world), dataset=open_dataset(world / "data"))
    gone = replace(other, endpoint=("http://127.0.0.1:9",), attempts=2)
    with pytest.raises(EngineError, match=r"no usable answer in 2 attempts.*ConnectError"):
        connect(gone, rule_of(world), dataset=open_dataset(world / "data"))
    with pytest.raises(EngineError, match="--endpoint gpu-7:8000 is no URL such as"):
        base_url("gpu-7:8000")


def test_retrained_weights_are_another_model(world: Path, tmp_path: Path) -> None:
    """What the tolerance between servers is for: it lets rounding pass and no other weights."""
    write_model(tmp_path / "m", byte_level(480), seed=1)
    retrain(tmp_path / "m")
    with serve(world / "teacher") as first, serve(tmp_path / "m") as second:
        engine, other = ask(world, first).handshake, ask(world, second).handshake
        rounded = np.nanmean(np.abs(np.subtract(engine.losses, other.losses)))
    assert 0 < rounded < 0.1, "a hundredth of one layer is within what kernels may differ by"
