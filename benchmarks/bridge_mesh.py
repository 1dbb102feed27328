"""How long the leaders of both worlds take to connect: pair by pair, against one group of all.

    python benchmarks/bridge_mesh.py [--sizes 32 64 128 256] [--students-per-teacher 3]

Each leader is a forked process of this machine. It opens its end of the bridge, and each student's
leader sends one request and takes the reply. The contender is what the bridge was before: one gloo
group of all leaders, and one barrier in it. As many ranks' meeting before a step is timed, too: a
group that connects as it goes. Times are the slowest leader's, from when all processes stand ready;
they share this machine's cores with each other and with what else runs, so the processor time of
all of them, connecting alone, is what is compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from measure import Report
from torch import distributed as dist

from megatron_plugin.bridge import Pairing, StudentBridge, TeacherBridge, TeacherReply, TeacherRows
from megatron_plugin.star_group import star_group

TIMEOUT = timedelta(minutes=10)
ROWS, PLACES = 4, 2048
LESS = 3.0
"""By how much one group of all leaders takes more processor time, from `LARGE` of them on."""
LARGE = 128

Leader = Callable[[dist.Store, int, Pairing], object]
"""Returns what keeps the connections open."""


def main() -> None:
    """Connect all sizes in all ways, and print how long each took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--students-per-teacher", type=int, default=3)
    options = parser.parse_args()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    torch.set_num_threads(1)
    report = Report()
    for size in options.sizes:
        teachers = size // (1 + options.students_per_teacher)
        pairing = Pairing(teachers * options.students_per_teacher, teachers)
        compare(pairing, report)
    if report.missed:
        raise SystemExit(f"missed: {', '.join(report.missed)}")


def compare(pairing: Pairing, report: Report) -> None:
    """Print what one number of leaders takes in each way."""
    size = pairing.num_students + pairing.num_teachers
    print(f"\n{pairing.num_students} students' leaders, {pairing.num_teachers} teachers', "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    used = []
    for name, leader in WAYS.items():
        found = connect_all(leader, pairing)
        used.append(found.processor_seconds)
        report.say(name, f"{found.seconds:.2f} s, {found.processor_seconds:.2f} s of processors, "
                         f"at most {found.sockets} sockets each")  # fmt: skip
    for name, own in zip(("pairs", "meeting"), used[1:], strict=True):
        what = f"one group's processor time by the {name}'"
        if size >= LARGE:
            report.check(what, used[0] / own, least=LESS)
        else:
            report.say(what, f"{used[0] / own:.1f} x")


def in_one_group(store: dist.Store, rank: int, pairing: Pairing) -> object:
    """Connect all leaders with all others, as gloo does unless told otherwise."""
    size = pairing.num_students + pairing.num_teachers
    group = dist.ProcessGroupGloo(dist.PrefixStore("all", store), rank, size, TIMEOUT)
    group.monitored_barrier(TIMEOUT)  # type: ignore[attr-defined]  # torch's stubs lack it
    return group


def in_pairs(store: dist.Store, rank: int, pairing: Pairing) -> object:
    """Connect as the trainer does, and exchange one step's messages."""
    if rank < pairing.num_students:
        student = StudentBridge(store, pairing, replica=rank, timeout_minutes=10)
        bounds = torch.tensor([[0, PLACES]], dtype=torch.int32).repeat(ROWS, 1)
        rows = TeacherRows(torch.full((ROWS, PLACES), rank, dtype=torch.int32), bounds)
        assert student.request(rows).wait().losses.unique().tolist() == [rank]
        return student
    replica = rank - pairing.num_students
    teacher = TeacherBridge(store, pairing, replica=replica, job_rank=rank)
    asked = teacher.receive()
    teacher.reply([TeacherReply(request.input_ids.float()) for request in asked])
    return teacher


def in_a_star(store: dist.Store, rank: int, pairing: Pairing) -> object:
    """Meet as the student's ranks do before a step."""
    size = pairing.num_students + pairing.num_teachers
    group = star_group(dist.PrefixStore("star", store), rank, size, TIMEOUT)
    group.monitored_barrier(TIMEOUT)  # type: ignore[attr-defined]  # torch's stubs lack it
    return group


WAYS: dict[str, Leader] = {
    "one group of all, a barrier": in_one_group,
    "the bridge's pairs, a request and its reply": in_pairs,
    "the meeting's star, a barrier": in_a_star,
}


@dataclass(frozen=True)
class Connected:
    """What it took to connect: one leader, or all.

    Attributes:
        seconds: of wall time; the slowest leader's.
        processor_seconds: of this process's threads; all leaders' together.
        sockets: that are open; the most of a leader.
    """

    seconds: float
    processor_seconds: float
    sockets: int


def connect_all(leader: Leader, pairing: Pairing) -> Connected:
    """Fork the leaders, let them connect, and return what it took."""
    context = multiprocessing.get_context("fork")
    found: Queue[Connected] = context.Queue()
    opened, never = context.Event(), context.Event()
    port = context.Value("i", 0)
    size = pairing.num_students + pairing.num_teachers
    ranks = [
        context.Process(target=run, args=(leader, rank, pairing, port, opened, never, found))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    # After the forks: a process forked beside the store's thread may wait for it for ever.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.value = store.port
    opened.set()
    try:
        results = [found.get(timeout=TIMEOUT.total_seconds()) for _ in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
    return Connected(
        seconds=max(each.seconds for each in results),
        processor_seconds=sum(each.processor_seconds for each in results),
        sockets=max(each.sockets for each in results),
    )


def run(
    leader: Leader, rank: int, pairing: Pairing, port: Any, opened: Event, never: Event,
    found: Queue[Connected],
) -> None:  # fmt: skip
    """Be one leader: start with all others, say how long it took, stay until all have."""
    opened.wait()
    size = pairing.num_students + pairing.num_teachers
    store = dist.TCPStore("127.0.0.1", port.value, is_master=False, timeout=TIMEOUT)
    if store.add("ready", 1) == size:
        store.set("start", "")
    store.wait(["start"])
    start, start_used = time.perf_counter(), time.process_time()
    connections = leader(store, rank, pairing)
    seconds, used = time.perf_counter() - start, time.process_time() - start_used
    found.put(Connected(seconds, used, open_sockets()))
    never.wait()  # all are killed when all have connected
    del connections


def open_sockets() -> int:
    """Return how many sockets this process holds."""
    names = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return sum(name.startswith("socket:") for name in names)


if __name__ == "__main__":
    main()
