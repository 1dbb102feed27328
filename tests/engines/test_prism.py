"""The align job on Beam's portable runner, which speaks the protocols that Dataflow uses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.flink_cluster import ENGINES
from tests.engines.workload import Workload, external, finish, start
from tests.support.corpus import digests
from tests.support.servers import free_port, require_program, serve, worker_pool

pytestmark = pytest.mark.engines


@pytest.fixture
def prism() -> Iterator[list[str]]:
    """The options of Prism, but for its workers."""
    program = require_program(ENGINES / "bin" / "prism", "`make test-prism` builds it")
    port = free_port()
    with serve([program, f"--job_port={port}", "--serve_http=false"], port):
        yield ["--runner=PortableRunner", f"--job_endpoint=localhost:{port}"]


@pytest.mark.parametrize("shuffle", ["files", "runner"])
def test_prism_gives_the_local_bytes(
    prism: list[str], small: Workload, tmp_path: Path, shuffle: str
) -> None:
    output = tmp_path / "out"
    with worker_pool() as (address, _):
        beam = [*prism, *external(address), f"--shuffle={shuffle}"]
        finish(start(small.arguments(output, *beam)))
    assert digests(output) == digests(small.dataset)
