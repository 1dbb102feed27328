"""One corpus and one cluster for all tests that use them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.flink_cluster import FlinkCluster, flink_cluster
from tests.engines.workload import Workload, make_workload


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """ENGINE_MEGABYTES of text and their dataset."""
    return make_workload(tmp_path_factory.mktemp("workload"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """A little text and its dataset."""
    return make_workload(tmp_path_factory.mktemp("small"), megabytes=4)


@pytest.fixture
def flink(tmp_path: Path) -> Iterator[FlinkCluster]:
    """A cluster of two task managers."""
    with flink_cluster(tmp_path / "flink") as cluster:
        yield cluster
