"""One corpus and one cluster for all tests that use them."""

from collections.abc import Iterator, Sequence

import pytest

from tests.engines.flink_cluster import FlinkCluster, FlinkHosts, flink_cluster, flink_on_hosts
from tests.engines.hosts import Host, network
from tests.engines.workload import Workload, make_workload


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return make_workload(tmp_path_factory.mktemp("workload"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return make_workload(tmp_path_factory.mktemp("small"), megabytes=4)


@pytest.fixture(scope="session")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Text enough that there is a middle of aligning, and its dataset."""
    return make_workload(tmp_path_factory.mktemp("middling"), megabytes=12)


@pytest.fixture
def hosts() -> Iterator[Sequence[Host]]:
    with network(3) as made:
        yield made


@pytest.fixture(scope="module")
def flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlinkCluster]:
    """A cluster of two task managers on this machine, for tests that leave it whole."""
    with flink_cluster(tmp_path_factory.mktemp("flink"), attempts=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def spread_flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlinkHosts]:
    """A cluster of three hosts, likewise."""
    folder = tmp_path_factory.mktemp("hosts")
    with network(3) as made, flink_on_hosts(folder, made, attempts=2) as cluster:
        yield cluster


@pytest.fixture
def flink_hosts(spread_flink: FlinkHosts) -> Iterator[FlinkHosts]:
    """That cluster, and the test on the host that launches."""
    with spread_flink.launcher.inside():
        yield spread_flink
