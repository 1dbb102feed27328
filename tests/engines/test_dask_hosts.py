"""The align job on a Dask cluster of three hosts that share a folder, and through the loss of one.

The hosts are network namespaces of this machine, the shared folder is its disk.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines.hosts import Host
from tests.engines.workload import ROOT, RUN_SECONDS, SLOWLY, Workload, await_commits, finish, start
from tests.support.corpus import digests
from tests.support.servers import kill, wait_until

pytestmark = pytest.mark.engines

PORT = 8786
START_SECONDS = 120
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    # How long a silent host counts as alive: half a minute and five minutes unless said otherwise;
    # distributed calls 11 s and less too low.
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "15s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "10s",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "30s",
}


@contextlib.contextmanager
def dask_cluster(hosts: Sequence[Host], logs: Path) -> Iterator[str]:
    """Run a scheduler on the first host and a worker on each of the others; yield its address."""
    address = f"tcp://{hosts[0].address}:{PORT}"
    scheduler = ["dask_scheduler", f"--host={hosts[0].address}", f"--port={PORT}"]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_dask(hosts[0], logs, *scheduler))
        assert wait_until(lambda: hosts[0].accepts(PORT), first, seconds=START_SECONDS)
        for host in hosts[1:]:
            local = f"--local-directory={logs}/{host.name}"
            worker = ["dask_worker", address, f"--host={host.address}", "--nthreads=1", local]
            stack.enter_context(_dask(host, logs, *worker))
        yield address


@contextlib.contextmanager
def _dask(
    host: Host, logs: Path, program: str, *arguments: str
) -> Iterator["subprocess.Popen[bytes]"]:
    module = ["-m", f"distributed.cli.{program}", *arguments, "--no-dashboard"]
    with (logs / f"{host.name}.log").open("wb") as log:
        process = subprocess.Popen(
            host.command(sys.executable, *module),
            env=ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            yield process
        finally:
            kill(process)


def submit(
    workload: Workload, output: Path, host: Host, address: str, *more: str
) -> "subprocess.Popen[str]":
    beam = [
        "--runner=apache_beam.runners.dask.dask_runner.DaskRunner",
        f"--dask_client_address={address}", "--dask_partition_size=1",
    ]  # fmt: skip
    return start(workload.arguments(output, *beam, *more), on=host.command, environment=ENVIRONMENT)


def test_workers_on_two_hosts_give_the_local_bytes(
    hosts: Sequence[Host], small: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with dask_cluster(hosts, tmp_path) as address:
        finish(submit(small, output, hosts[0], address))
    assert digests(output) == digests(small.dataset)


def test_a_host_that_is_cut_off_does_not_cost_the_dataset(
    hosts: Sequence[Host], small: Workload, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with dask_cluster(hosts, tmp_path) as address:
        job = submit(small, output, hosts[0], address, SLOWLY)
        await_commits(job, output, 1)
        hosts[-1].cut_off()
        said, _ = job.communicate(timeout=RUN_SECONDS)
        if job.returncode != 0:  # then with one sentence, and a second run on what is left
            assert job.returncode == 1, said
            assert said.strip().count("\n") == 0, said
            assert "run the same command again to resume" in said
            finish(submit(small, output, hosts[0], address, SLOWLY))
    assert digests(output) == digests(small.dataset)
