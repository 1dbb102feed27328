"""The align job goes through DataflowRunner: submitted, staged, run as staged, and finished.

What stands in for Dataflow is a fake of its REST API and Beam's own runner for the staged pipeline,
so this proves what we send and what the launcher does with the answers, not Dataflow's service.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.fake_dataflow import Replay, serve_dataflow
from tests.services.stores import SHARD_BYTES, ObjectStore
from tests.support.corpus import Corpus, align_options, command_line, digests

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
REPLAY = Path(__file__).with_name("replay.py")


@pytest.fixture
def store(gcs: ObjectStore) -> ObjectStore:
    """Dataflow stages to Google Cloud Storage only."""
    return gcs


def arguments(corpus: str, endpoint: str) -> list[str]:
    beam = [
        "--runner=DataflowRunner", "--project=vocag-test", "--region=europe-west4",
        f"--temp_location={corpus}/temp", f"--staging_location={corpus}/staging",
        f"--setup_file={ROOT}/pyproject.toml", f"--dataflow_endpoint={endpoint}", "--no_auth",
        "--max_num_workers=40", "--machine_type=n2-highmem-4",
    ]  # fmt: skip
    output = f"{corpus}/aligned"
    return command_line(align_options(Corpus(corpus), output, *beam, shard_bytes=SHARD_BYTES))


def replay_staged(store: ObjectStore, corpus: str, folder: Path) -> Replay:
    """Return what downloads a job's staged files, installs its package and runs its pipeline."""

    def replay(job: dict[str, Any]) -> subprocess.Popen[str]:
        staged = {name.split("/")[-1]: name for name in store.list(f"{corpus}/staging")}
        for name in ("pipeline.pb", "workflow.tar.gz"):
            (folder / name).write_bytes(store.read(f"{corpus}/staging/{staged[name]}"))
        package = folder / "package"
        install = [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
            "--no-index", "--target", package, folder / "workflow.tar.gz",
        ]  # fmt: skip
        subprocess.run(install, check=True, capture_output=True)
        return subprocess.Popen(
            [sys.executable, REPLAY, folder / "pipeline.pb", package],
            cwd=folder,
            env={**os.environ, **store.environment, "PYTHONPATH": str(package)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return replay


def test_a_job_through_dataflow_runner_gives_the_local_bytes(
    store: ObjectStore, remote_corpus: tuple[str, Path], tmp_path: Path
) -> None:
    corpus, reference = remote_corpus
    with serve_dataflow(replay_staged(store, corpus, tmp_path)) as service:
        result = store.run("-m", "beam_jobs.align", *arguments(corpus, service.url))
        assert result.returncode == 0, result.stderr
    assert "DataflowRunner" in store.read(f"{corpus}/aligned/report.html").decode()
    assert store.digests(f"{corpus}/aligned") == digests(reference)
    assert service.polls > 1
    check_job(service.job, f"{corpus}/temp")


def check_job(job: dict[str, Any], temp: str) -> None:
    environment = job["environment"]
    (pool,) = environment["workerPools"]
    assert job["type"] in ("JOB_TYPE_BATCH", 1)
    assert pool["machineType"] == "n2-highmem-4"
    assert pool["autoscalingSettings"]["maxNumWorkers"] == 40
    assert temp.removeprefix("gs://") in environment["tempStoragePrefix"]
    packages = {package["name"] for package in pool["packages"]}
    assert "workflow.tar.gz" in packages
    images = [image["containerImage"] for image in pool["sdkHarnessContainerImages"]]
    assert all("beam_python3.12" in image for image in images), images


def test_a_job_that_fails_on_dataflow_is_reported(
    store: ObjectStore, remote_corpus: tuple[str, Path]
) -> None:
    corpus, _ = remote_corpus

    def fail(_: dict[str, Any]) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"], text=True)

    with serve_dataflow(fail) as service:
        failed = store.run("-m", "beam_jobs.align", *arguments(corpus, service.url))
    assert failed.returncode == 1, failed.stderr
    assert "run the same command again to resume" in failed.stderr
    assert "manifest.json" not in store.list(f"{corpus}/aligned")
