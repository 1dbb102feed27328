"""A Flink cluster loses a task manager, its workers or a whole host in the middle of aligning."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines.flink_cluster import POOL_PORT, FlinkHosts, flink_on_hosts
from tests.engines.hosts import Host
from tests.engines.workload import SLOWLY, Workload, await_commits, finish, start
from tests.support.corpus import digests
from tests.support.servers import kill, worker_pool

pytestmark = pytest.mark.engines


@pytest.fixture
def mortal(hosts: Sequence[Host], tmp_path: Path) -> Iterator[FlinkHosts]:
    """A cluster of three hosts that its test may kill; it runs on it."""
    with flink_on_hosts(tmp_path / "flink", hosts) as cluster, cluster.launcher.inside():
        yield cluster


def test_a_task_manager_is_killed_in_the_middle(
    mortal: FlinkHosts, middling: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    job = start(middling.arguments(output, *mortal.options(), SLOWLY))
    await_commits(job, output, 1)
    kill(mortal.cluster.task_managers[0])
    finish(job)
    assert digests(output) == digests(middling.dataset)
    assert len(mortal.cluster.last_job_failures()) >= 1


def test_a_worker_pool_is_killed_in_the_middle_and_started_again(
    mortal: FlinkHosts, middling: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    job = start(middling.arguments(output, *mortal.options(), SLOWLY))
    await_commits(job, output, 1)
    kill(mortal.pools[0])
    log = tmp_path / "second.log"
    with mortal.hosts[0].inside(), worker_pool(POOL_PORT, log=log):  # as a supervisor would
        finish(job)
    assert "Starting worker" in log.read_text()
    assert digests(output) == digests(middling.dataset)
    assert len(mortal.cluster.last_job_failures()) >= 1


def test_a_host_is_cut_off_in_the_middle_and_computes_on(
    mortal: FlinkHosts, middling: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    job = start(middling.arguments(output, *mortal.options(), SLOWLY))
    await_commits(job, output, 1)
    mortal.hosts[0].cut_off()
    finish(job)
    assert digests(output) == digests(middling.dataset)
    assert len(mortal.cluster.last_job_failures()) >= 1
