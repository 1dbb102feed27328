"""Readers leave the process group and the connections of their trainer, and end with it."""

import multiprocessing
import os
import socket
import subprocess
import sys

import psutil
import pytest
import torch

from pipeline.streaming import load_batches
from tests.support.streaming_data import make_documents, small_rows, write_dataset

WAITS_SECONDS = 600
# A trainer that says when its reader has read, and then waits for its own end.
TRAINER = """
import sys
from torch.utils.data._utils import worker
from pipeline.streaming import load_batches
from tests.support.streaming_data import small_rows

worker.MP_STATUS_CHECK_INTERVAL = 1e6  # seconds until DataLoader's reader looks for its trainer
batches = iter(load_batches(small_rows(sys.argv[1]), micro_batch_size=12, num_workers=2))
next(batches)
print("reads", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader") / "data"
    write_dataset(folder, make_documents([50] * 70), shard_sizes=[70])
    return folder


@pytest.mark.parametrize("start_method", [None, "forkserver"])
def test_a_reader_leaves_its_trainers_group_and_connections(folder, start_method, monkeypatch):
    """Whatever starts processes by default: none between them stays in the trainer's group."""
    default = multiprocessing.get_context(start_method)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", default)
    others = multiprocessing.active_children()
    own, peer = socket.socketpair()
    peer.settimeout(WAITS_SECONDS)
    batches = iter(load_batches(small_rows(folder), micro_batch_size=12, num_workers=1))
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    assert os.getpgid(worker.pid) == worker.pid != os.getpgrp()
    assert psutil.Process(worker.pid).ppid() == os.getpid()
    own.close()
    assert peer.recv(1) == b"", "the reader holds the connection open"
    assert len(list(batches)) > 0
    peer.close()


def test_a_lack_of_shared_memory_has_a_remedy(folder, monkeypatch):
    """As in a container, which has 64 MiB of it; torch's RuntimeError asked for a report."""

    def fail(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file </t>: No space left")

    monkeypatch.setattr(torch.Tensor, "share_memory_", fail)
    with pytest.raises(ValueError, match=r"no room in /dev/shm \(unable .* --workers 0\)"):
        iter(load_batches(small_rows(folder), micro_batch_size=12, num_workers=1))


@pytest.mark.slow
def test_no_reader_outlives_a_killed_trainer(folder):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout.readline() == "reads\n"
    trainer.kill()
    # Its output ends when nobody holds it open, the reader included.
    assert trainer.communicate(timeout=WAITS_SECONDS) == ("", None)
