"""A Flink cluster loses a task manager, its workers or a whole host in the middle of aligning."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.engines.flink_cluster import POOL_PORT, FlinkHosts, flink_on_hosts
from tests.engines.hosts import Host
from tests.engines.workload import SLOWLY, Workload, await_commits, finish, start
from tests.support.corpus import digests
from tests.support.servers import kill, worker_pool

pytestmark = pytest.mark.engines

Loss = Callable[[FlinkHosts, Path], AbstractContextManager[None]]


@contextmanager
def task_manager_killed(cluster: FlinkHosts, _: Path) -> Iterator[None]:
    kill(cluster.cluster.task_managers[0])
    yield


@contextmanager
def worker_pool_killed_and_started_again(cluster: FlinkHosts, folder: Path) -> Iterator[None]:
    kill(cluster.pools[0])
    log = folder / "second.log"
    with cluster.hosts[0].inside(), worker_pool(POOL_PORT, log=log):  # as a supervisor would
        yield
    assert "Starting worker" in log.read_text()


@contextmanager
def host_cut_off_that_computes_on(cluster: FlinkHosts, _: Path) -> Iterator[None]:
    cluster.hosts[0].cut_off()
    yield


@pytest.mark.parametrize(
    "loss",
    [task_manager_killed, worker_pool_killed_and_started_again, host_cut_off_that_computes_on],
)
def test_a_loss_in_the_middle_costs_no_bytes(
    hosts: Sequence[Host], middling: Workload, tmp_path: Path, loss: Loss
) -> None:
    output = tmp_path / "out"
    with flink_on_hosts(tmp_path / "flink", hosts) as mortal, mortal.launcher.inside():
        job = start(middling.arguments(output, *mortal.options(), SLOWLY))
        await_commits(job, output, 1)
        with loss(mortal, tmp_path):
            finish(job)
        assert len(mortal.cluster.last_job_failures()) >= 1
    assert digests(output) == digests(middling.dataset)
