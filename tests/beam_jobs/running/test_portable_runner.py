"""The align job through Beam's portable protocols: another process runs it, with other workers.

Beam's own Python job service takes a cluster's place. What pickling, options or staging
break shows here; `make test-flink` and `make test-prism` run the job on other people's runners.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_jobs.align.__main__ import main
from beam_jobs.align.command import align
from beam_jobs.running.exits import RESUME
from tests.support.corpus import align_options, command_line, digests, reference_dataset
from tests.support.servers import FAILURE, free_port, serve, worker_pool, write_failing_worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of Beam's Python job service."""
    port, staging = free_port(), tmp_path_factory.mktemp("staging")
    module = "apache_beam.runners.portability.local_job_service_main"
    command = [sys.executable, "-m", module, f"--port={port}", f"--staging_dir={staging}"]
    with serve(command, port):
        yield f"localhost:{port}"


def options(endpoint: str, pool: str) -> tuple[str, ...]:
    return (
        "--runner=PortableRunner", f"--job_endpoint={endpoint}",
        "--environment_type=EXTERNAL", f"--environment_config={pool}",
    )  # fmt: skip


def test_a_job_service_gives_the_same_bytes(tmp_path: Path, service: str) -> None:
    corpus, reference = reference_dataset()
    with worker_pool() as (address, _):
        for shuffle in ("files", "runner"):
            beam = options(service, address)
            align(align_options(corpus, tmp_path / shuffle, *beam, shuffle=shuffle))
            assert digests(tmp_path / shuffle) == digests(reference)


def test_a_failure_in_a_worker_is_told_in_one_sentence(
    tmp_path: Path, service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, _ = reference_dataset()
    output = tmp_path / "out"
    with worker_pool(first=write_failing_worker(tmp_path / "first")) as (address, _):
        assert main(command_line(align_options(corpus, output, *options(service, address)))) == 1
    (path,) = output.glob(".vocag-*/error.txt")
    cause = f"the job failed: {FAILURE}"
    told = f"vocag align: {cause} (traceback in {path}); {RESUME}"
    assert told in capsys.readouterr().err.splitlines()
    assert "Traceback" in path.read_text()
