"""The align job through Beam's portable protocols: another process runs it, with other workers.

Beam's own Python job service stands where a cluster's would. What pickling, options or staging
break shows here; `make test-flink` and `make test-prism` run the job on other people's runners.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_jobs.align.command import align
from beam_jobs.running.exits import RESUME
from tests.support.corpus import align_options, command_line, digests, reference_dataset
from tests.support.servers import (
    FAILURE,
    free_port,
    serve,
    worker_pool,
    write_failing_worker,
)

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def job_service(staging: Path) -> Iterator[str]:
    """Run Beam's Python job service; yield its address."""
    port = free_port()
    module = "apache_beam.runners.portability.local_job_service_main"
    command = [sys.executable, "-m", module, f"--port={port}", f"--staging_dir={staging}"]
    with serve(command, port):
        yield f"localhost:{port}"


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """The options of a job service with a worker pool."""
    staging = tmp_path_factory.mktemp("staging")
    with job_service(staging) as endpoint, worker_pool() as (address, _):
        yield (
            "--runner=PortableRunner", f"--job_endpoint={endpoint}",
            "--environment_type=EXTERNAL", f"--environment_config={address}",
        )  # fmt: skip


@pytest.mark.parametrize("shuffle", ["files", "runner"])
def test_a_job_service_gives_the_same_bytes(
    tmp_path: Path, portable: tuple[str, ...], shuffle: str
) -> None:
    corpus, reference = reference_dataset()
    align(align_options(corpus, tmp_path, *portable, shuffle=shuffle))
    assert digests(tmp_path) == digests(reference)


def test_a_failure_in_a_worker_is_told_in_one_sentence(tmp_path: Path) -> None:
    corpus, reference = reference_dataset()
    output = tmp_path / "out"
    first = write_failing_worker(tmp_path / "first")
    with job_service(tmp_path / "staging") as endpoint, worker_pool(first=first) as (address, _):
        runner = [
            "--runner=PortableRunner", f"--job_endpoint={endpoint}",
            "--environment_type=EXTERNAL", f"--environment_config={address}",
        ]  # fmt: skip
        options = align_options(corpus, output, *runner)
        done = subprocess.run(
            [sys.executable, "-m", "beam_jobs.align", *command_line(options)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    (path,) = output.glob(".vocag-*/error.txt")
    cause = f"the job failed: {FAILURE}"
    assert done.stderr == f"vocag align: {cause} (traceback in {path}); {RESUME}\n"
    assert "Traceback" in path.read_text()
    align(align_options(corpus, output))  # here, where workers are well
    assert digests(output) == digests(reference)
