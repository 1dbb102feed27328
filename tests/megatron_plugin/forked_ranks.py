"""Ranks without their start-up: forked from one process that has imported the trainer already.

What torchrun does for a job that goes well or fails at once: the same environment, one store, and
an end of all ranks when one fails. Jobs that are killed run under torchrun.

VOCAG_TEST_MEGATRON_NEXT: a checkout of Megatron-LM, whose Megatron the ranks run.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path

from torch.distributed import TCPStore

from tests.support.fork_server import fork_context

ROOT = Path(__file__).resolve().parents[2]


def fork_ranks(num_ranks, module, *command, timeout=2400, check=True, **environment):
    """Run a module's `main` in each rank; return the job's end, with all ranks' output in one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **environment,
    }
    argv = [module, *map(str, command)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(num_ranks):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = Path(folder) / str(rank)
            ranks.append(_context().Process(target=_run_rank, args=(argv, own, output)))
            ranks[-1].start()
        code = _end(ranks, timeout)
        # Of ranks that came to speak before another failed.
        said = "".join(path.read_text() for path in sorted(Path(folder).iterdir()))
    if code and check:
        raise AssertionError(f"the job failed:\n{said[-9000:]}")
    return subprocess.CompletedProcess(argv, code, said, said)


def job_environment(**changes):
    """Return the environment of a job: one thread per process, this checkout importable."""
    path = os.pathsep.join(filter(None, [os.environ.get("VOCAG_TEST_MEGATRON_NEXT"), str(ROOT)]))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own, **changes}


def _context():
    modules = ("tests.megatron_plugin.trainer", "tests.megatron_plugin.warm")
    return fork_context(modules, job_environment())


def _run_rank(argv, environment, output):
    """Be a rank: output into a file, and a trainer of one's own."""
    with output.open("wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    # As in a process that torchrun starts; readers would else import all of the trainer again.
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = argv
    import_module(argv[0]).main()


def _end(ranks, timeout):
    """Wait for all ranks, or end them when one has failed; return the job's exit code."""
    deadline = time.monotonic() + timeout
    running = list(ranks)
    while running and time.monotonic() < deadline and not any(rank.exitcode for rank in ranks):
        wait([rank.sentinel for rank in running], deadline - time.monotonic())
        running = [rank for rank in running if rank.exitcode is None]
    for rank in running:
        rank.kill()
    for rank in ranks:
        rank.join()
    return 1 if running or any(rank.exitcode for rank in ranks) else 0
