"""Scores of a real vLLM are those of the same model in the process; `make test-served`."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docstring_corpus import docstrings
from packaged_tokenizer import packaged_tokenizer

from beam_jobs import storage
from pipeline.command_line.commands import run_command
from pipeline.dataset.score_files import list_scores
from schemas.sidecar import ScoreManifest, decode_sidecar
from tests.schemas.test_stored_distributions import slow_read
from tests.served.vllm import MODEL, SETUP, VllmServer

pytestmark = [
    pytest.mark.served,
    pytest.mark.skipif(not (SETUP / ".installed").exists(), reason="needs make test-served"),
]

NUM_DOCUMENTS = 12
LENGTHS = ("--seq-length", "256")  # three of the documents are split
TOP = ("--top-k", "4", "--draws", "0", "--top-log-probs", "float16")
SAME = 0.004
"""Nats by which kernels and their batches may move a loss; fp16 stores up to 0.002 of it."""


@pytest.fixture(scope="module")
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def server(
    running: ExitStack, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> VllmServer:
    started = VllmServer(smollm2, tmp_path_factory.mktemp("server") / "log")
    started.start(running)
    return started


@pytest.fixture(scope="module")
def unscored(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's first documents in several shards."""
    root = tmp_path_factory.mktemp("data")
    first = islice(docstrings("numpy"), NUM_DOCUMENTS)
    lines = [json.dumps({"id": name, "text": text}) for name, text in first]
    (root / "few.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    run("align", "--input", root / "few.jsonl", "--output", root / "data", "--teacher", smollm2,
        "--student", packaged_tokenizer("mistral"), "--shard-bytes", "16384")  # fmt: skip
    return root / "data"


@pytest.fixture(scope="module")
def own(unscored: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same scored in this process."""
    data = shutil.copytree(unscored, tmp_path_factory.mktemp("own") / "data")
    run("score", data, "--teacher", smollm2, "--dtype", "float32", *LENGTHS, *TOP)
    return data


@pytest.fixture
def data(unscored: Path, tmp_path: Path) -> Path:
    """An unscored dataset of the test's own."""
    return shutil.copytree(unscored, tmp_path / "data")


def run(command: str, *arguments: object, status: int = 0) -> None:
    assert run_command([command, *map(str, arguments)]) == status


def served(data: Path, *servers: VllmServer, more: tuple[str, ...] = TOP) -> list[object]:
    """Return the arguments of `vocag score` with servers."""
    return [
        data, "--engine", "openai", "--model", MODEL, "--dtype", "float32", *LENGTHS, *more,
        "--quantization", "none", *(f"--endpoint={each.url}" for each in servers),
    ]  # fmt: skip


def scores_of(data: Path) -> ScoreManifest:
    (found,) = list_scores(str(data))
    return found.manifest


def shards_of(data: Path) -> list[bytes]:
    return [(data / record.file).read_bytes() for record in scores_of(data).sidecars]


def require_same(data: Path, own: Path) -> None:
    """Check losses, and the entries of every position, of all shards."""
    rule = scores_of(own).rule.distributions
    assert rule is not None
    num_tokens = num_swapped = num_entries = 0
    for found, expected in zip(shards_of(data), shards_of(own), strict=True):
        losses = decode_sidecar(found, at="").losses.astype(float)
        np.testing.assert_allclose(losses, decode_sidecar(expected, at="").losses, atol=SAME)
        num_tokens += len(losses)
        if scores_of(data).rule.distributions is None:
            continue
        for one, other in zip(slow_read(found, rule), slow_read(expected, rule), strict=True):
            assert len(one) == len(other) == rule.top_k
            values = [[np.exp(value) for _, value in entries] for entries in (one, other)]
            np.testing.assert_allclose(*values, atol=SAME)
            # Those that are equally likely but for rounding may change places.
            num_swapped += sum(a != b for (a, _), (b, _) in zip(one, other, strict=True))
            num_entries += len(one)
    assert num_tokens > 2000
    assert num_swapped <= 0.005 * num_entries


def test_losses_and_the_likeliest_tokens(
    data: Path, own: Path, server: VllmServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run("score", *served(data, server))
    shown = capsys.readouterr().out
    assert "1 server ready: vllm 0.32.0" in shown
    assert "3 documents split" in shown
    assert "4.00 a position on average" in shown
    require_same(data, own)


def test_losses_alone(data: Path, own: Path, server: VllmServer) -> None:
    run("score", *served(data, server, more=()))
    require_same(data, own)


@pytest.mark.parametrize("method", ["teacher", "distill"])
def test_training_is_that_of_own_scores(
    own: Path, data: Path, server: VllmServer, tmp_path: Path, repository: Path, method: str
) -> None:
    run("score", *served(data, server))
    logs = []
    for name, dataset in (("served", data), ("own", own)):
        run(
            "train", "--data", dataset, "--stored-losses", scores_of(dataset).rule.fingerprint[:12],
            "--method", method, "--student", repository / "examples/student_10m", "--random-init",
            "--num-steps", 3, "--warmup-steps", 0, "--learning-rate", "1e-3", *LENGTHS,
            "--global-batch-size", 2, "--micro-batch-size", 2, "--output", tmp_path / name,
        )  # fmt: skip
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
    assert [len(log) for log in logs] == [3, 3]
    for found, expected in zip(*logs, strict=True):
        assert found.keys() == expected.keys()
        for metric in expected.keys() - {"seconds"}:
            own_value = expected[metric]  # None: nothing to average
            assert found[metric] == (own_value and pytest.approx(own_value, rel=2e-3)), metric


def at_first_shard(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something as soon as the job has written its first file."""
    write, acts = storage.write_atomically, [act]

    def changed(path: str, *arguments: Any, **options: Any) -> None:
        write(path, *arguments, **options)
        if path.endswith(".safetensors") and acts:
            acts.pop()()

    monkeypatch.setattr(storage, "write_atomically", changed)


def test_two_servers_of_which_one_is_killed(
    data: Path,
    own: Path,
    server: VllmServer,
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = server.num_answers
    with ExitStack() as own_stack:
        second = VllmServer(smollm2, tmp_path / "log")
        second.start(own_stack)
        at_first_shard(monkeypatch, second.kill)
        run("score", *served(data, server, second))
        assert second.num_answers > 1
    assert server.num_answers > before
    require_same(data, own)


def test_a_killed_server_ends_the_job_and_the_same_command_goes_on(
    data: Path,
    own: Path,
    server: VllmServer,
    running: ExitStack,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [*served(data, server), "--attempts", "2"]
    with monkeypatch.context() as patch:
        at_first_shard(patch, server.kill)
        run("score", *command, status=1)
    said = capsys.readouterr().err
    assert f"{server.url} gave no usable answer in 2 attempts" in said
    assert "run the same command again" in said
    left = {path: path.read_bytes() for path in data.glob("*.safetensors")}
    assert len(left) == 1
    server.start(running)
    run("score", *command)
    assert "1 shard taken over" in capsys.readouterr().out
    assert all(path.read_bytes() == kept for path, kept in left.items())
    require_same(data, own)
