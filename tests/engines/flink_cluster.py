"""A standalone Flink cluster: a job manager, and task managers of two slots.

All are on this machine, or each on a host of its own.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from tests.engines.hosts import Host
from tests.engines.workload import external
from tests.support.servers import (
    START_SECONDS,
    free_port,
    require_program,
    serve,
    wait_until,
    worker_environment,
    worker_pool,
)

ENGINES = Path(sys.prefix) / "engines"
SET_UP = "`make test-flink` sets up what these tests need"
NUM_SLOTS = 2
NUM_TASK_MANAGERS = 2
POOL_PORT = 50000


@dataclass(frozen=True)
class FlinkCluster:
    """The address of Flink's REST service, the task managers' processes, and Flink's version."""

    master: str
    task_managers: tuple["subprocess.Popen[bytes]", ...]
    version: str

    def options(self) -> list[str]:
        """Return the options of a job for this cluster, but for its workers' environment."""
        return [
            "--runner=FlinkRunner", f"--flink_master={self.master}",
            f"--flink_version={self.version}", "--parallelism=2",
            f"--flink_job_server_jar={ENGINES}/flink/job-server.jar",
        ]  # fmt: skip

    @contextlib.contextmanager
    def job_server(self, folder: Path) -> Iterator[str]:
        """Run Beam's job server with its files in a folder; yield its address."""
        port = free_port()
        command = [
            "java", "-jar", ENGINES / "flink" / "job-server.jar", f"--flink-master={self.master}",
            f"--job-port={port}", "--artifact-port=0", "--expansion-port=0",
            f"--artifacts-dir={folder}/staged",
        ]  # fmt: skip
        with serve(command, port, log=folder / "job_server.log"):
            yield f"localhost:{port}"

    def last_job_failures(self) -> list[str]:
        """Return why the newest job was started again, the first line of each time's report."""
        jobs: list[dict[str, Any]] = _ask(self.master, "jobs/overview")["jobs"]
        newest = max(jobs, key=lambda job: job["start-time"])
        told = _ask(self.master, f"jobs/{newest['jid']}/exceptions")
        entries = told["exceptionHistory"]["entries"]
        return [str(entry["stacktrace"]).splitlines()[0] for entry in entries]


@dataclass(frozen=True)
class FlinkHosts:
    """A cluster whose machines are hosts, with a worker pool next to each task manager."""

    cluster: FlinkCluster
    launcher: Host  # where the job manager runs, and the tests
    hosts: Sequence[Host]  # of the task managers, pools and logs, in one order
    pools: Sequence["subprocess.Popen[bytes]"]
    pool_logs: Sequence[Path]

    def options(self) -> list[str]:
        """Return the options of a job whose workers are the pools'."""
        return [*self.cluster.options(), *self.pool_options()]

    def pool_options(self) -> list[str]:
        """Return those that name the pools: what is local to each task manager."""
        return external(f"localhost:{POOL_PORT}")


@contextlib.contextmanager
def flink_on_hosts(
    folder: Path, hosts: Sequence[Host], *, attempts: int = 300, pools_on: Sequence[str] = ()
) -> Iterator[FlinkHosts]:
    """Run a cluster with job manager and launcher on the first host, and pools on the others.

    `pools_on` is a command before each pool's, which runs it somewhere.
    """
    logs = [folder / f"pool_{number}.log" for number in range(len(hosts) - 1)]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        pools = []
        for host, log in zip(hosts[1:], logs, strict=True):
            with host.inside():
                pool = worker_pool(POOL_PORT, log=log, on=pools_on)
                pools.append(stack.enter_context(pool)[1])
        with hosts[0].inside():
            cluster = flink_cluster(folder / "flink", hosts=hosts, attempts=attempts)
            up = stack.enter_context(cluster)
        yield FlinkHosts(up, hosts[0], hosts[1:], pools, logs)


@contextlib.contextmanager
def flink_cluster(
    folder: Path, *, hosts: Sequence[Host] = (), attempts: int = 300
) -> Iterator[FlinkCluster]:
    """Run a cluster of two task managers here, or of one on each host but the caller's, the first.

    A job that has failed is started again a second later, for so many attempts.
    """
    home = ENGINES / "flink"
    version = require_program(home / "version", SET_UP).read_text().strip()
    rest_port = free_port()
    address = hosts[0].address if hosts else "localhost"
    environment = _configure(folder, home, version, address, rest_port, attempts)
    master = f"{address}:{rest_port}"
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(
            serve(
                [home / "bin" / "jobmanager.sh", "start-foreground"],
                rest_port,
                address=address,
                environment=environment,
                log=folder / "job_manager.log",
            )
        )
        task_managers = tuple(
            _task_manager(stack, home, environment, folder / f"tasks_{n}.log", host)
            for n, host in enumerate(hosts[1:] or [None] * NUM_TASK_MANAGERS)
        )

        def all_there() -> bool:
            return bool(_ask(master, "overview")["taskmanagers"] == len(task_managers))

        if not wait_until(all_there, manager, seconds=START_SECONDS):
            pytest.fail(f"the task managers did not register; see {folder}")
        yield FlinkCluster(master, task_managers, version)


def process_environment(more: Mapping[str, str] | None = None) -> list[str]:
    """Return the options that let every task manager start workers itself, by Beam's program."""
    # Otherwise the program makes an environment for every worker and installs what was staged.
    variables = {"RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT": "1"}
    variables |= {name: worker_environment()[name] for name in ("PATH", "PYTHONPATH")}
    variables |= more or {}
    boot = require_program(ENGINES / "bin" / "boot", SET_UP)
    config = {"command": str(boot), "env": variables}
    return ["--environment_type=PROCESS", f"--environment_config={json.dumps(config)}"]


def _task_manager(
    stack: contextlib.ExitStack,
    home: Path,
    environment: dict[str, str],
    log: Path,
    host: Host | None,
) -> "subprocess.Popen[bytes]":
    address = host.address if host else "localhost"
    with host.inside() if host else contextlib.nullcontext():
        port = free_port()
        command = [
            home / "bin" / "taskmanager.sh", "start-foreground",
            f"-Dtaskmanager.host={address}", f"-Dtaskmanager.rpc.port={port}",
        ]  # fmt: skip
        # Beam's program leaves its options where it runs.
        server = serve(
            command, port, address=address, environment=environment, log=log, folder=log.parent
        )
        return stack.enter_context(server)


def _configure(
    folder: Path, home: Path, version: str, address: str, rest_port: int, attempts: int
) -> dict[str, str]:
    """Write a cluster's configuration; return the environment of its programs."""
    for name in ("conf", "temp"):
        (folder / name).mkdir(parents=True)
    is_old = version.startswith("1.")
    # Otherwise Flink fills one task manager before it takes the next.
    spread = (
        {"cluster.evenly-spread-out-slots": True}
        if is_old
        else {"taskmanager.load-balance.mode": "SLOTS"}
    )
    theirs = yaml.safe_load((home / "conf" / "config.yaml").read_text())
    settings = {
        "env": theirs["env"],  # what Java 17 has to open
        "jobmanager.rpc.address": address,
        "jobmanager.rpc.port": free_port(),
        "jobmanager.memory.process.size": "1000m",
        "rest.address": address,
        "rest.port": rest_port,
        "taskmanager.numberOfTaskSlots": NUM_SLOTS,
        "taskmanager.memory.process.size": "1200m",
        "taskmanager.memory.managed.size": "128m",
        "taskmanager.memory.network.min": "64m",
        "taskmanager.memory.network.max": "64m",
        "heartbeat.interval": 2000,
        "heartbeat.timeout": 10000,  # of a machine that is lost; the job starts again without it
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": attempts,
        "restart-strategy.fixed-delay.delay": "1 s",
        "io.tmp.dirs": str(folder / "temp"),
        **spread,
    }
    (folder / "conf" / "config.yaml").write_text(yaml.safe_dump(settings, width=10**6))
    name = "log4j-console.properties"
    (folder / "conf" / name).write_bytes((home / "conf" / name).read_bytes())
    places = {"FLINK_CONF_DIR": folder / "conf", "FLINK_LOG_DIR": folder, "FLINK_PID_DIR": folder}
    return {**os.environ, **{name: str(place) for name, place in places.items()}}


def _ask(master: str, what: str) -> dict[str, Any]:
    with urlopen(f"http://{master}/{what}", timeout=START_SECONDS) as answer:
        said: dict[str, Any] = json.load(answer)
    return said
