"""A Flink cluster loses a task manager, or its workers, in the middle of aligning."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.flink_cluster import FlinkCluster, flink_cluster
from tests.engines.workload import SLOWLY, Workload, await_commits, external, finish, start
from tests.support.corpus import digests
from tests.support.servers import free_port, kill, worker_pool

pytestmark = pytest.mark.engines


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[FlinkCluster]:
    """A cluster of two task managers that its test may kill."""
    with flink_cluster(tmp_path / "flink") as cluster:
        yield cluster


def restarts(folder: Path) -> int:
    """Return how often Flink has started the job again."""
    log = (folder / "flink" / "job_manager.log").read_text()
    return log.count("from state RESTARTING to RUNNING")


def test_a_task_manager_is_killed_in_the_middle(
    mortal: FlinkCluster, middling: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with worker_pool(log=tmp_path / "pool.log") as (address, _):
        beam = [*mortal.options(), *external(address), SLOWLY]
        job = start(middling.arguments(output, *beam))
        await_commits(job, output, 1)
        kill(mortal.task_managers[0])
        finish(job)
    assert digests(output) == digests(middling.dataset)
    assert restarts(tmp_path) >= 1


def test_a_worker_pool_is_killed_in_the_middle_and_started_again(
    mortal: FlinkCluster, middling: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    port = free_port()
    with worker_pool(port, log=tmp_path / "first.log") as (address, pool):
        beam = [*mortal.options(), *external(address), SLOWLY]
        job = start(middling.arguments(output, *beam))
        await_commits(job, output, 1)
        kill(pool)
    with worker_pool(port, log=tmp_path / "second.log"):  # as a supervisor would
        finish(job)
    assert "Starting worker" in (tmp_path / "second.log").read_text()
    assert digests(output) == digests(middling.dataset)
    assert restarts(tmp_path) >= 1
