"""The jobs run on a real Flink cluster, with workers of their own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from beam_jobs.running.exits import RESUME
from tests.engines.flink_cluster import (
    FlinkCluster,
    FlinkHosts,
    flink_on_hosts,
    process_environment,
)
from tests.engines.hosts import Host
from tests.engines.workload import Workload, external, finish, start
from tests.support.corpus import digests
from tests.support.scored_data import score_arguments, sidecars, write_world
from tests.support.servers import free_port

pytestmark = pytest.mark.engines


def test_hosts_with_a_worker_pool_each_give_the_local_bytes(
    flink_hosts: FlinkHosts, workload: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    finish(start(workload.arguments(output, *flink_hosts.options())))
    assert digests(output) == digests(workload.dataset)
    assert len(digests(output)) > 8
    assert "FlinkRunner" in (output / "report.html").read_text()
    for log in flink_hosts.pool_logs:
        assert "Starting worker" in log.read_text(), "one host did all the work"
    assert flink_hosts.cluster.last_job_failures() == []


@pytest.mark.parametrize("shuffle", ["files", "runner"])
def test_task_managers_that_start_workers_themselves_give_the_local_bytes(
    flink: FlinkCluster, small: Workload, tmp_path: Path, shuffle: str
) -> None:
    output = tmp_path / "out"
    beam = [*flink.options(), *process_environment(), f"--shuffle={shuffle}"]
    finish(start(small.arguments(output, *beam)))
    assert digests(output) == digests(small.dataset)


def test_a_job_server_that_runs_elsewhere_gives_the_local_bytes(
    flink_hosts: FlinkHosts, small: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with flink_hosts.cluster.job_server(tmp_path) as endpoint:
        beam = ["--runner=FlinkRunner", f"--job_endpoint={endpoint}", "--parallelism=2"]
        finish(start(small.arguments(output, *beam, *flink_hosts.pool_options())))
    assert digests(output) == digests(small.dataset)


def test_scores_from_flink_are_the_local_bytes(flink_hosts: FlinkHosts, tmp_path: Path) -> None:
    world = write_world(tmp_path / "world")
    run = ["-m", "beam_jobs.score", *score_arguments(world)]
    finish(start(run))
    here = sidecars(world)
    for name in here:
        (world / "data" / name).unlink()
    finish(start([*run, *flink_hosts.options()]))
    assert len(here) > 1
    assert sidecars(world) == here


def test_workers_that_do_not_see_the_output_say_so_and_nothing_else(
    hosts: Sequence[Host], small: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    elsewhere = f'mount -t tmpfs none {output} && exec "$@"'
    on = ["unshare", "--mount", "sh", "-c", elsewhere, "sh"]
    cluster = flink_on_hosts(tmp_path / "flink", hosts, attempts=2, pools_on=on)
    with cluster as flink, flink.launcher.inside():
        job = start(small.arguments(output, *flink.options()))
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
    assert "with --environment_type EXTERNAL that is the worker pool next to it" in said
    assert said.endswith(f"; {RESUME}\n")
    assert said.count("\n") == 1
