"""Does cost grow evenly with size? The align job on a Flink cluster of this machine, two slots.

    python -m benchmarks.flink_cost --megabytes 1000 2000 4000

Prints a row for each size as soon as it is measured: seconds of the command and of Flink's job, CPU
seconds of the workers, of everything in Java and of the launcher (which other work on the machine
lengthens less), and the peak memory of the largest process of each kind. Each size has a cluster of
its own. A machine holds a few hundred MB of distinct text: above 250 MB the same text comes again
under new ids, so sizes to compare are best multiples of that. Disk: about five times the text.
`make test-flink` sets up what it needs; run it from the repository's root.
"""

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from pipeline.dataset.reading import read_manifest
from tests.engines.flink_cluster import FlinkCluster, flink_cluster, process_environment
from tests.engines.workload import NUM_FILES, ROOT, align_arguments, finish, start

SAMPLE_SECONDS = 0.25
MOST_DISTINCT_MEGABYTES = 250
FLINKS_SILENT_SECONDS = 50
"""Flink's own choice; the tests' shorter one takes a machine that is busy for one that is lost."""

SHARD_BYTES = "64MiB"
COLUMNS = (
    *("text", "student tokens", "shards", "restarts", "command", "Flink's job"),
    *("CPU of workers", "of it in the kernel", "CPU of Java", "CPU of launcher"),
    *("a worker", "a task manager", "job manager", "job server", "launcher", "load"),
)


class Watch:
    """What processes have used, with all that they have started.

    Attributes:
        peaks: resident bytes of the largest process of each kind.
    """

    def __init__(self, kinds: Mapping[int, str]) -> None:
        """Watch processes, by id, whose kinds are named; Java that another has started is its own.

        Args:
            kinds: what each process is.
        """
        self.peaks: Counter[str] = Counter()
        self._kinds = kinds
        self._seconds: dict[tuple[int, float], tuple[str, float, float]] = {}

    def cpu_seconds(self, *kinds: str) -> float:
        """Return the CPU time of all processes of these kinds, to the last sample."""
        return sum(user + system for kind, user, system in self._seconds.values() if kind in kinds)

    def kernel_seconds(self, kind: str) -> float:
        """Return the part of it in which the kernel worked for them: files, memory."""
        return sum(system for each, _, system in self._seconds.values() if each == kind)

    def sample(self) -> None:
        """Look at every process once."""
        for pid, kind in self._kinds.items():
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(pid)
                for process in (parent, *parent.children(recursive=True)):
                    with contextlib.suppress(psutil.Error, OSError, ValueError):
                        self._look(process, kind)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look now and then, until the context ends."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(SAMPLE_SECONDS):
                self.sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _look(self, process: psutil.Process, kind: str) -> None:
        if kind == "launcher" and process.name() == "java":
            kind = "job server"
        if kind == "task manager" and process.pid not in self._kinds and process.name() != "java":
            kind = "worker"
        times = process.cpu_times()
        key = (process.pid, process.create_time())
        self._seconds[key] = (kind, times.user, times.system)
        self.peaks[kind] = max(self.peaks[kind], _peak_bytes(process.pid))


def measure(megabytes: int, folder: Path) -> list[str]:
    """Return a row of the table, for a corpus that is made first."""
    copies = math.ceil(megabytes / MOST_DISTINCT_MEGABYTES)
    size = [f"--bytes={megabytes / copies}MB", f"--files={NUM_FILES}", f"--copies={copies}"]
    finish(start([str(ROOT / "benchmarks" / "corpus.py"), f"--output={folder}/corpus", *size]))
    silence = {"silent_seconds": FLINKS_SILENT_SECONDS}
    with flink_cluster(folder / "flink", **silence) as cluster:
        # Not one pool for both: the task manager that ends first would stop the other's worker.
        beam = [*cluster.options(), *process_environment(), f"--shard-bytes={SHARD_BYTES}"]
        began = time.monotonic()
        job = start(align_arguments(f"{folder}/corpus/*.jsonl", folder / "out", *beam))
        watch = Watch(_kinds(cluster, job))
        with watch.watching():
            finish(job)
        seconds = time.monotonic() - began
        inside, failures = cluster.last_job_seconds(), cluster.last_job_failures()
    for failure in failures:
        print(f"Flink started the job again: {failure}", file=sys.stderr, flush=True)
    manifest = read_manifest(f"{folder}/out")
    tokens = manifest.totals["num_student_tokens"]
    java = watch.cpu_seconds("task manager", "job manager", "job server")
    kinds = ("worker", "task manager", "job manager", "job server", "launcher")
    return [
        f"{megabytes:,} MB", f"{tokens / 1e6:,.1f} M", f"{len(manifest.shards)}",
        f"{len(failures)}", f"{seconds:.0f} s", f"{inside:.0f} s",
        f"{watch.cpu_seconds('worker'):.0f} s", f"{watch.kernel_seconds('worker'):.0f} s",
        f"{java:.0f} s",
        f"{watch.cpu_seconds('launcher'):.0f} s",
        *(f"{watch.peaks[kind] / 1e6:,.0f} MB" for kind in kinds), f"{os.getloadavg()[1]:.1f}",
    ]  # fmt: skip


def main() -> None:
    """Measure the sizes that the command line names."""
    parser = argparse.ArgumentParser(description="Time and memory against size, through Flink.")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200, 400, 800])
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for megabytes in parser.parse_args().megabytes:
        with tempfile.TemporaryDirectory(prefix="vocag-flink-") as folder:
            print(f"| {' | '.join(measure(megabytes, Path(folder)))} |", flush=True)


def _kinds(cluster: FlinkCluster, job: "subprocess.Popen[str]") -> dict[int, str]:
    managers = {process.pid: "task manager" for process in cluster.task_managers}
    return {cluster.manager.pid: "job manager", job.pid: "launcher", **managers}


def _peak_bytes(pid: int) -> int:
    """Return the most resident memory that a process has had, mapped files counted."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
