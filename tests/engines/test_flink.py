"""The jobs run on a real Flink cluster, with workers of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.flink_cluster import FlinkCluster
from tests.engines.workload import Workload, finish, start
from tests.support.corpus import digests
from tests.support.scored_data import score_arguments, sidecars, write_world
from tests.support.servers import worker_pool

pytestmark = pytest.mark.engines


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[list[str]]:
    """The options that name a worker pool."""
    with worker_pool(log=tmp_path / "pool.log") as (address, _):
        yield ["--environment_type=EXTERNAL", f"--environment_config={address}"]


def test_flink_gives_the_local_bytes(
    flink: FlinkCluster, workload: Workload, pool: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    finish(start(workload.arguments(output, *flink.options(), *pool)))
    assert digests(output) == digests(workload.dataset)
    assert len(digests(output)) > 8
    assert "FlinkRunner" in (output / "report.html").read_text()
    workers = (tmp_path / "pool.log").read_text().count("Starting worker")
    assert workers >= len(flink.task_managers), "one task manager did all the work"


def test_scores_from_flink_are_the_local_bytes(
    flink: FlinkCluster, pool: list[str], tmp_path: Path
) -> None:
    world = write_world(tmp_path / "world")
    run = ["-m", "beam_jobs.score", *score_arguments(world)]
    finish(start(run))
    here = sidecars(world)
    for name in here:
        (world / "data" / name).unlink()
    finish(start([*run, *flink.options(), *pool]))
    assert len(here) > 1
    assert sidecars(world) == here
