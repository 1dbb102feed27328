"""A run that is stopped anywhere goes on with the samples it has not seen, whatever its layout."""

import json
import multiprocessing
import os
import signal
from dataclasses import asdict, replace

import pytest

from pipeline.streaming import StreamMismatchError, StreamState, load_batches
from tests.support.streaming_data import (
    GLOBAL_BATCH_SIZE,
    make_documents,
    read_run,
    small_rows,
    write_dataset,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """About 50 rows in three shards."""
    folder = tmp_path_factory.mktemp("resume") / "data"
    documents = make_documents([(37 * number) % 90 + 5 for number in range(70)])
    write_dataset(folder, documents, shard_sizes=[30, 20, 20])
    return folder


def open_rows(folder, **options):
    return small_rows(folder, **({"num_epochs": 2, "seed": 11} | options))


def test_resume_at_every_step_and_resize(folder):
    rows = open_rows(folder)
    layouts = [(4, 3), (6, 2), (3, 2), (1, 12), (2, 3)]
    expected = read_run(rows, len(rows), num_replicas=1)
    assert len(expected) == 2 * rows.samples_per_epoch > 7 * GLOBAL_BATCH_SIZE
    assert len(rows.datasets[0].plan) - rows.samples_per_epoch < GLOBAL_BATCH_SIZE
    for step, consumed in enumerate(range(0, len(rows) + 1, GLOBAL_BATCH_SIZE)):
        num_replicas, micro_batch_size = layouts[step % len(layouts)]
        restarted = open_rows(folder)
        saved = json.loads(json.dumps(asdict(rows.state(consumed))))
        rest = read_run(
            restarted,
            len(rows),
            num_replicas=num_replicas,
            micro_batch_size=micro_batch_size,
            consumed_samples=restarted.restore(StreamState(**saved)),
        )
        assert rest == {place: row for place, row in expected.items() if place >= consumed}


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("seq_length", 65, "seq_length 64, this run has 65"),
        ("teacher_seq_length", 100, "teacher_seq_length 96, this run has 100"),
        ("seed", 12, "seed 11, this run has 12"),
        ("shuffle_shards", 2, "shuffle_shards 1, this run has 2"),
        ("window_rows", 6, "rules .*window_rows"),
        ("global_batch_size", 11, "global_batch_size 12, this run has 11"),
        ("global_batch_size", 6, "global_batch_size 12, this run has 6"),  # as many in an epoch
    ],
)
def test_another_run_is_refused_with_the_reason(folder, option, value, told):
    saved = open_rows(folder).state(24)
    with pytest.raises(StreamMismatchError, match=f"made with {told}"):
        open_rows(folder, **{option: value}).restore(saved)


def test_a_checkpoint_from_before_batch_sizes_were_kept_needs_equal_epochs(folder):
    saved = replace(open_rows(folder).state(24), global_batch_size=0)
    assert open_rows(folder).restore(saved) == 24
    with pytest.raises(StreamMismatchError, match=r"samples_per_epoch .*global_batch_size"):
        open_rows(folder, global_batch_size=11).restore(saved)


def test_a_batch_size_that_does_not_divide_what_was_consumed_is_refused(folder):
    rows = open_rows(folder)
    with pytest.raises(StreamMismatchError, match=r"consumed 6 samples.*isn't a multiple of .* 12"):
        rows.restore(replace(rows.state(0), consumed_samples=6))


def test_a_killed_worker_is_an_error(folder):
    others = multiprocessing.active_children()
    batches = iter(load_batches(open_rows(folder), micro_batch_size=12, num_workers=1))
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"{worker.pid}"):
        list(batches)
