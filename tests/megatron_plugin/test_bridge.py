"""The bridge over real gloo connections, in threads, and the look-ahead on top of it."""

import argparse
import gc
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("megatron.core")

from megatron_plugin import bridge as bridges
from megatron_plugin.arguments import TeacherOptions
from megatron_plugin.bridge import (
    BridgeError,
    Pairing,
    StudentBridge,
    TeacherAnswer,
    TeacherBridge,
    TeacherRows,
)
from megatron_plugin.models.places import WHOLE_ROWS
from megatron_plugin.student.guide import Guide
from megatron_plugin.student.micro_batch import micro_batch
from megatron_plugin.student.requests import GuidedBatches, connect
from megatron_plugin.upstream import parallel_state
from pipeline.command_line.failures import hints_of
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from tests.support.datasets import build_dataset

PLACES = 6


def make_rows(first, count):
    """Return rows whose ids say which they are."""
    ids = torch.arange(first, first + count, dtype=torch.int32).unsqueeze(1).repeat(1, PLACES)
    return TeacherRows(ids, torch.tensor([[0, PLACES]], dtype=torch.int32).repeat(count, 1))


def say(rows):
    """Return losses, one next token's id and its log-probability, which say whose they are."""
    ids = rows.input_ids.float()
    return torch.stack((ids, ids + 1, -ids), -1)


def serve(store, pairing, replica):
    """Answer every request with the ids, and return how many rows came together each time."""
    bridge = TeacherBridge(store, pairing, replica=replica)
    sizes = []
    while requests := bridge.receive():
        sizes.append([len(request) for request in requests])
        bridge.reply([say(request) for request in requests])
    return sizes


def ask(store, pairing, replica, num_steps):
    """Ask two steps ahead; check the order of the replies."""
    bridge = StudentBridge(store, pairing, replica=replica, timeout=timedelta(minutes=5), width=1)
    rows = [make_rows(100 * replica + 10 * step, 4) for step in range(num_steps)]
    pending = [bridge.request(each) for each in rows]
    for each, wait in zip(rows, pending, strict=True):
        answer = wait()
        assert torch.equal(answer.losses, each.input_ids.float())
        assert torch.equal(answer.next_ids, answer.losses.unsqueeze(-1) + 1)
        assert torch.equal(answer.next_log_probs, -answer.losses.unsqueeze(-1))
    bridge.close()


@pytest.mark.parametrize(("students", "teachers"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_replies_come_to_their_requests(students, teachers):
    store, pairing = dist.HashStore(), Pairing(students, teachers)
    with ThreadPoolExecutor(students + teachers) as pool:
        serving = [pool.submit(serve, store, pairing, t) for t in range(teachers)]
        asking = [pool.submit(ask, store, pairing, s, 3) for s in range(students)]
        for job in asking:
            job.result(timeout=300)
        sizes = [job.result(timeout=300) for job in serving]
    # Each teacher serves `together` students at once, or has a share of one student's four rows.
    together, sharing = max(1, students // teachers), max(1, teachers // students)
    assert sizes == [[[4 // sharing] * together] * 3] * teachers


def test_what_is_answered_is_let_go():
    """gloo never calls a send complete unless it is waited for: all were kept to a run's end."""
    store, pairing, sent = dist.HashStore(), Pairing(1, 1), []
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, store, pairing, 0)
        bridge = StudentBridge(store, pairing, replica=0, timeout=timedelta(minutes=5), width=1)
        (link,) = bridge._links
        own = link.send

        def send(tensor, tag):
            sent.append(StorageWeakRef(tensor.untyped_storage()))
            return own(tensor, tag)

        link.send = send
        for step in range(5):
            bridge.request(make_rows(step, 4))()
        gc.collect()
        assert [each.expired() for each in sent] == [True] * 10
        bridge.close()
        serving.result(timeout=300)


def test_a_silent_teacher_is_an_error(monkeypatch):
    monkeypatch.setattr(bridges, "_GRACE_SECONDS", 0.0)
    store, pairing = dist.HashStore(), Pairing(1, 1)
    done = threading.Event()

    def stay_silent():
        bridge = TeacherBridge(store, pairing, replica=0)
        done.wait(300)
        return bridge

    with ThreadPoolExecutor(1) as pool:
        silent = pool.submit(stay_silent)
        bridge = StudentBridge(store, pairing, replica=0, timeout=timedelta(seconds=1))
        with pytest.raises(BridgeError, match="the teacher doesn't answer over the bridge"):
            bridge.request(make_rows(0, 2))()
        done.set()
        silent.result(timeout=300)


@pytest.mark.parametrize(("minutes", "seconds"), [(1, 1), (0.0001, 60)])
def test_a_silent_teacher_has_megatrons_timeout_of_the_moment(monkeypatch, minutes, seconds):
    """Megatron takes another one after the first step; the leader has less patience than ranks."""
    given = argparse.Namespace(
        data_parallel_size=1,
        distributed_timeout_minutes=minutes,
        distributed_timeout_seconds_after_init=seconds,
    )
    monkeypatch.setattr(bridges, "_GRACE_SECONDS", 0.0)
    for name, value in (("is_pipeline_last_stage", True), ("get_data_parallel_rank", 0)):
        monkeypatch.setattr(parallel_state, name, lambda value=value: value)
    monkeypatch.setattr(parallel_state, "get_tensor_and_context_parallel_rank", lambda: 0)
    store, pairing, done = dist.HashStore(), Pairing(1, 1), threading.Event()

    def answer_once():
        bridge = TeacherBridge(store, pairing, replica=0)
        if minutes == 1:
            bridge.reply([say(request)[..., :1] for request in bridge.receive()])
        done.wait(300)
        return bridge

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(answer_once)
        bridge = connect(TeacherOptions(world_size=1), given, store, width=0)
        if minutes == 1:
            bridge.request(make_rows(0, 2))()
        with pytest.raises(BridgeError) as raised:
            bridge.request(make_rows(0, 2))()
        done.set()
        serving.result(timeout=300)
    option = "--distributed-timeout-" + ("seconds-after-init" if minutes == 1 else "minutes")
    assert f"raise {option} if" in str(raised.value)
    assert hints_of(raised.value)[0].startswith(f"hint: {option} ")


def test_a_signals_own_error_is_not_the_peers():
    """As torch raises when a reader dies while the student waits."""

    def report(*_):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    before = signal.signal(signal.SIGUSR1, report)
    try:
        with (
            pytest.raises(RuntimeError, match="DataLoader worker") as raised,
            bridges._peer("the teacher", "waited for it;"),
        ):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not isinstance(raised.value, BridgeError)


class _OneRank:
    def size(self):
        return 1


class _Recorder:
    """A bridge that answers at once and notes when it was asked."""

    def __init__(self):
        self.asked, self.answered = [], []

    def request(self, rows):
        self.asked.append(len(rows))
        return self.wait

    def wait(self):
        self.answered.append(len(self.asked))
        return TeacherAnswer(torch.zeros(self.asked[0], 64, 1))


def test_steps_are_asked_ahead_and_drained(tmp_path):
    build_dataset(tmp_path)
    rows = AlignedRows(StreamConfig(Reading(str(tmp_path)), seq_length=64, teacher_seq_length=64))
    device, pairs = torch.device("cpu"), [(2 * i, 2 * i + 1) for i in range(8)]
    batches = [
        micro_batch(rows.__getitems__(pair), i, pair, device=device, share=WHOLE_ROWS)
        for i, pair in enumerate(pairs)
    ]
    recorder = _Recorder()
    guided = GuidedBatches(
        iter(batches),
        recorder,
        num_microbatches=2,
        guide=Guide(leave_out=None),
        group=_OneRank(),
        lookahead=2,
    )
    first = next(guided)
    # One step is in hand, and two more were asked for before it is computed.
    assert recorder.asked == [4, 4, 4]
    assert recorder.answered == [1]
    assert first.number == 0
    losses = first.taught.losses
    assert bool(((losses == 0) | losses.isnan()).all())
    assert [next(guided).number for _ in range(2)] == [1, 2]
    assert recorder.asked == [4, 4, 4, 4]
    guided.drain()
    assert len(recorder.answered) == 4
    assert next(guided).number == 3
    with pytest.raises(StopIteration):
        next(guided)
