"""The jobs run on a real Flink cluster, with workers of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_jobs.runners import RESUME
from tests.engines.flink_cluster import FlinkCluster, process_environment
from tests.engines.workload import Workload, external, finish, start
from tests.support.corpus import digests
from tests.support.scored_data import score_arguments, sidecars, write_world
from tests.support.servers import free_port, worker_pool

pytestmark = pytest.mark.engines


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[list[str]]:
    """The options that name a worker pool."""
    with worker_pool(log=tmp_path / "pool.log") as (address, _):
        yield external(address)


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


@pytest.mark.parametrize("shuffle", ["files", "runner"])
def test_task_managers_that_start_workers_themselves_give_the_local_bytes(
    flink: FlinkCluster, small: Workload, tmp_path: Path, shuffle: str
) -> None:
    output = tmp_path / "out"
    beam = [*flink.options(), *process_environment(), f"--shuffle={shuffle}"]
    finish(start(small.arguments(output, *beam)))
    assert digests(output) == digests(small.dataset)


def test_a_job_server_that_runs_elsewhere_gives_the_local_bytes(
    flink: FlinkCluster, small: Workload, pool: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with flink.job_server(tmp_path) as endpoint:
        beam = ["--runner=FlinkRunner", f"--job_endpoint={endpoint}", "--parallelism=2", *pool]
        finish(start(small.arguments(output, *beam)))
    assert digests(output) == digests(small.dataset)


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


def test_workers_that_do_not_see_the_output_say_so_and_nothing_else(
    flink: FlinkCluster, small: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    elsewhere = f'mount -t tmpfs none {output} && exec "$@"'
    on = ["unshare", "--mount", "sh", "-c", elsewhere, "sh"]
    with worker_pool(log=tmp_path / "pool.log", on=on) as (address, _):
        job = start(small.arguments(output, *flink.options(), *external(address)))
        said, _ = job.communicate()
    assert job.returncode == 1, said
    assert said.startswith("vocag align: the job failed: OptionsError: worker "), said
    assert f"does not see {output}/.vocag-" in said
    assert said.endswith(f"; {RESUME}\n")
    assert said.count("\n") == 1


def test_workers_that_can_not_be_had_are_told_in_one_sentence(
    flink: FlinkCluster, small: Workload, tmp_path: Path
) -> None:
    nobody = external(f"localhost:{free_port()}")
    job = start(small.arguments(tmp_path / "out", *flink.options(), *nobody))
    said, _ = job.communicate()
    assert job.returncode == 1, said
    assert "could not reach a server that it needs (ConnectException: " in said
    assert "with --environment_type EXTERNAL that is the worker pool beside it" in said
    assert said.endswith(f"; {RESUME}\n")
    assert said.count("\n") == 1
