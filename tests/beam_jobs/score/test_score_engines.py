"""`vocag score` with a served teacher: sidecars, of a teacher of their own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs.score.command import main
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import find_scores, list_scores
from pipeline.drawing.formatting import format_plural
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.interface import line_of
from pipeline.scoring.sidecars import ShardToScore
from schemas.sidecar import EngineRecord, decode_sidecar
from tests.support.completions_server import MODEL, CompletionsServer, off, right
from tests.support.datasets import build_dataset, make_texts
from tests.support.scored_data import (
    SEQ_LENGTH,
    read_sidecars,
    run_score,
    score_arguments,
    served_arguments,
    sidecars,
)


def losses_of(files: dict[str, bytes]) -> list[bytes]:
    """Return the sidecars of what scoring wrote, in the shards' order."""
    return [data for name, data in sorted(files.items()) if name.endswith(".safetensors")]


def losses_by_engine(unscored: Path) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    found = {}
    for scores in list_scores(str(unscored / "data")):
        engine = scores.manifest.rule.engine
        parts = [each.losses for each in read_sidecars(unscored, scores.manifest)]
        found[engine.name if engine else "transformers"] = np.concatenate(parts)
    return found


def test_a_served_teacher_s_losses_are_those_of_its_model(
    unscored: Path, server: CompletionsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_score(unscored)
    before = sidecars(unscored)
    assert main(served_arguments(unscored, server)) == 0
    shown = capsys.readouterr().out
    assert "1 server ready: vllm 0.20.2" in shown
    assert re.search(r"engine +float32, by openai \(vllm 0.20.2, quantization none\)\n", shown)
    assert before.items() < sidecars(unscored).items()
    losses = losses_by_engine(unscored)
    np.testing.assert_allclose(losses["openai"], losses["transformers"], rtol=1e-3, atol=1e-4)
    record = find_scores(MODEL, str(unscored / "data")).manifest.rule.engine
    assert record == EngineRecord("openai", "vllm", "0.20.2", "none", MODEL, "name")


def test_another_version_or_quantization_is_another_teacher(
    unscored: Path, server: CompletionsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(served_arguments(unscored, server)) == 0
    server.version = "0.21.0"
    assert main(served_arguments(unscored, server)) == 0
    assert main(served_arguments(unscored, server, "--quantization", "fp8")) == 0
    assert main(served_arguments(unscored, server, "--teacher", str(unscored / "teacher"))) == 0
    found = [s.manifest.rule.engine for s in list_scores(str(unscored / "data"))]
    assert len({(e.version, e.quantization, e.weights_of) for e in found if e}) == 4
    build_dataset(unscored / "new", make_texts(40))
    reuse = [*score_arguments(unscored)[1:], "--reuse", str(unscored / "data")]
    capsys.readouterr()
    assert main([str(unscored / "new"), *reuse]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"engine is \{.*'weights_of': 'files'\} there and None here;", shown)
    assert "reused          0 documents, the other 40 computed" in shown


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda answer: None, r'document "doc-.*gave no usable answer in 2 attempts'),
        (off, "losses of a plain text that differ by 3.00 nats a token from those at the start"),
    ],
)
def test_a_server_that_dies_or_goes_wrong_ends_the_job(
    unscored: Path,
    server: CompletionsServer,
    capsys: pytest.CaptureFixture[str],
    fault: Callable[[Any], Any],
    message: str,
) -> None:
    assert main(served_arguments(unscored, server)) == 0
    reference = sidecars(unscored)
    for name in reference:
        (unscored / "data" / name).unlink()
    all_requests = len(server.bodies)
    # Two of three shards are answered, roughly; then every answer is a fault.
    server.faults = [*[right] * 60, *[fault] * 100_000]
    assert main(served_arguments(unscored, server, "--attempts", "2", "--concurrency", "2")) == 1
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert "run the same command again" in said
    left = sidecars(unscored)
    assert left.items() <= reference.items(), "what is kept is right"
    assert 0 < len(losses_of(left)) < 3, "what was scored stays"
    server.faults = []
    asked = len(server.bodies)
    assert main(served_arguments(unscored, server)) == 0
    assert sidecars(unscored) == reference
    assert len(server.bodies) - asked < all_requests
    assert f"{format_plural(len(losses_of(left)), 'shard')} taken over" in capsys.readouterr().out


def wrong_about_a_shard(
    unscored: Path, server: CompletionsServer, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    """Let a server be 3 nats off about one shard's pieces, and right about any other's."""
    dataset = open_dataset(unscored / "data")
    rule = ContextRule.of_rows(PackingRules.of_dataset(dataset.manifest, seq_length=SEQ_LENGTH))

    def prompts(number: int) -> set[tuple[int, ...]]:
        part = ShardToScore.open(select_documents(dataset), number, rule)
        tokens = part.read_tokens()
        lines = (line_of(tokens, part.pieces, n, rule) for n in range(len(part.pieces)))
        return {tuple(line.input_ids.tolist()) for line in lines}

    own = prompts(shard).difference(*map(prompts, {0, 1, 2} - {shard}))
    complete = server.complete

    def changed(body: dict[str, Any]) -> dict[str, Any]:
        answer = complete(body)
        return off(answer) if tuple(body["prompt"]) in own else answer

    monkeypatch.setattr(server, "complete", changed)


def test_a_shard_far_from_the_rest_is_scored_again(
    unscored: Path,
    server: CompletionsServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain text's losses are right meanwhile: the servers prove themselves in vain."""
    assert main(served_arguments(unscored, server)) == 0
    reference = sidecars(unscored)
    for name in reference:
        (unscored / "data" / name).unlink()
    with monkeypatch.context() as patch:
        wrong_about_a_shard(unscored, server, patch, shard=1)
        assert main(served_arguments(unscored, server)) == 1
        message = capsys.readouterr().err
        again = shutil.copytree(unscored, unscored.with_name("again"))
        assert main(served_arguments(again, server)) == 0
        assert len(sidecars(again)) == 7, (
            "what comes out the same is accepted: three, their tables and a manifest"
        )
    far = r"the mean loss of 1 of 3 shards is far from the rest.* \S+-000001-of-000003.tar (\S+) "
    found = re.search(far + r"\(the others \S+\)", message)
    assert found, message
    own = np.nanmean(decode_sidecar(losses_of(reference)[1], at="").losses.astype(float))
    assert float(found[1]) - own == pytest.approx(3.0, abs=0.1)
    assert "check the servers" in message
    left = sidecars(unscored)
    assert left.items() <= reference.items()
    assert len(left) == 4
    assert "-000001-of-" not in " ".join(left)
    assert main(served_arguments(unscored, server)) == 0
    assert sidecars(unscored) == reference


def test_what_a_server_does_not_tell_must_be_stated(
    unscored: Path, server: CompletionsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(served_arguments(unscored, server, "--engine-version", "1.0")) == 2
    assert "--engine-version 1.0, but" in capsys.readouterr().err
    server.get = lambda path: 404 if "version" in path else CompletionsServer.get(server, path)  # type: ignore[method-assign]
    assert main(served_arguments(unscored, server)) == 2
    assert "does not report its version" in capsys.readouterr().err
    assert main(served_arguments(unscored, server, "--engine-version", "1.0")) == 0
