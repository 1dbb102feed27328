"""Rows: equal to a slow reference, each token once per epoch, whoever reads them."""

import multiprocessing
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
import torch

from pipeline.dataset.webdataset_documents import decoded_documents
from pipeline.packing.kernels import FORCED
from pipeline.packing.opening import open_run
from pipeline.packing.order import ReplicaBatches, RowOrder
from pipeline.scoring.stored_teachers import StoredTeachers
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, Rows, StreamConfig, collate_rows, load_batches
from schemas.document import AlignedDocument, Tokens
from schemas.errors import DatasetError
from tests.support.datasets import build_dataset, word_pieces
from tests.support.reference_rows import reference_row
from tests.support.scored_data import stored_rows
from tests.support.streaming_data import around, brute_force_spans, make_documents, write_dataset

SEQ, TEACHER_SEQ = 96, 128


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    lengths = [*np.random.default_rng(5).integers(1, 130, 47).tolist(), 400, 1, 2]
    folder = tmp_path_factory.mktemp("streaming") / "data"
    return write_dataset(folder, make_documents(lengths), shard_sizes=[20, 1, 29])


def open_rows(dataset, *, student=None, teacher=None, **options):
    """Open the dataset with small rows and windows, and other tokens around its texts."""
    defaults = {"seq_length": SEQ, "teacher_seq_length": TEACHER_SEQ, "window_rows": 6}
    options = defaults | {"shuffle_shards": 1} | options
    config = StreamConfig(Reading(str(dataset.folder)), **options)
    opened = open_run(config.data, seed=config.seed, max_epochs=config.num_epochs)
    records = {
        side: replace(getattr(opened.manifest, side), convention=tokens)
        for side, tokens in (("student", student), ("teacher", teacher))
    }
    return AlignedRows(config, opened=replace(opened, manifest=replace(opened.manifest, **records)))


def require_reference_rows(rows, documents):
    """Compare each row of an epoch with the slow reference."""
    own = rows.datasets[0]
    for sample in range(len(rows)):
        number = own.order.row_index(0, sample)
        expected = reference_row(own.plan, number, documents, rows.layout.max_segments)
        row = rows[sample]
        assert list(row) == list(rows.layout.shapes)
        for name, values in expected.items():
            assert np.array_equal(row[name].numpy(), values), (sample, name)


def test_the_docstring_s_example(tmp_path):
    student = Tokens(np.array([11, 12]), np.array([[0, 2], [2, 4]]))
    teacher = Tokens(np.array([21, 22, 23]), np.array([[0, 1], [1, 3], [3, 4]]))
    spans = np.array([[0, 2], [1, 3]])
    document = AlignedDocument("abcd", "0" * 64, 4, student, teacher, spans)
    dataset = write_dataset(tmp_path / "data", [document], shard_sizes=[1])
    rows = open_rows(
        dataset,
        seq_length=6,
        teacher_seq_length=6,
        student=around(1, 1, 2),
        teacher=around(9, 9, None),
    )
    expected = {
        "input_ids": [1, 11, 12, 2, 0, 0],
        "labels": [11, 12, 2, 0, 0, 0],
        "loss_mask": [1, 1, 1, 0, 0, 0],
        "position_ids": [0, 1, 2, 3, 0, 1],
        "teacher_spans": [[1, 3], [2, 4], [0, 0], [0, 0], [0, 0], [0, 0]],
        "teacher_input_ids": [9, 21, 22, 23, 0, 0],
        "teacher_position_ids": [0, 1, 2, 3, 0, 1],
        "cu_seqlens": [0, 4, 6],
        "teacher_cu_seqlens": [0, 4, 6],
        "num_quarantined_tokens": 0,
    }
    assert {name: tensor.tolist() for name, tensor in rows[0].items()} == expected


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (None, None),
        (around(), around()),
        (around(1, None, 2), around(None, 7)),
        (around(None, 5, None), around(6, 6, None)),
    ],
)
def test_rows_equal_the_reference(dataset, student, teacher):
    rows = open_rows(dataset, student=student, teacher=teacher)
    assert len(rows.datasets[0].order.group_row_starts) > 2, "the order has groups to mix"
    require_reference_rows(rows, dataset.documents)


@pytest.mark.parametrize("largest_id", [200, 60_000, 150_000])
def test_rows_equal_the_reference_for_every_stored_width(tmp_path, largest_id):
    documents = make_documents([40, 90, 200])
    for document in documents:
        document.student.input_ids[:] = document.student.input_ids[::-1] % largest_id
        document.student.input_ids[-1] = largest_id
    spans = documents[1].teacher_spans
    spans[spans[:, 1] > spans[:, 0], 1] += 300  # widths beyond one byte
    end = np.repeat(documents[1].student.byte_offsets[-1:], 400, axis=0)
    documents[1] = replace(documents[1], teacher=Tokens(np.arange(400), end))
    dataset = write_dataset(tmp_path / "data", documents, shard_sizes=[3])
    rows = open_rows(dataset, seq_length=128, teacher_seq_length=450)
    require_reference_rows(rows, documents)


def test_numbers_of_numpy_are_numbers_and_fractions_are_refused(tmp_path):
    """Plans are JSON, which knows none of numpy's; 1.5 epochs were an IndexError."""
    build_dataset(tmp_path / "data")
    given = StreamConfig(Reading(tmp_path / "data"), seq_length=np.int64(48))
    plain = StreamConfig(tmp_path / "data", seq_length=48)
    assert len(AlignedRows(given)) == len(AlignedRows(plain))
    for name in ("num_epochs", "seq_length", "seed"):
        with pytest.raises(ValueError, match=rf"{name} 1\.5 isn't a whole number"):
            StreamConfig(tmp_path / "data", **{name: 1.5})
    numbered = Reading(tmp_path / "data", student_bos=np.int64(3))  # was an AttributeError
    assert numbered == Reading(tmp_path / "data", student_bos="3")


def test_other_words_and_types_are_refused():
    """Damage was left out in silence, or an AttributeError followed."""
    with pytest.raises(ValueError, match="on_damage=Raise: choose one of raise, quarantine"):
        StreamConfig("aligned", on_damage="Raise")
    with pytest.raises(ValueError, match=r"teaching 'a' isn't a Teaching: give Teaching\("):
        StreamConfig("aligned", teaching="a")
    with pytest.raises(ValueError, match=r"'a' isn't a StreamConfig: give StreamConfig\('a'\)"):
        AlignedRows("a")


@pytest.mark.parametrize("make_student", [lambda: None, word_pieces], ids=["tiling", "with gaps"])
def test_rows_of_a_dataset_that_the_library_aligned_equal_the_reference(tmp_path, make_student):
    build_dataset(tmp_path / "data", student=make_student())
    rows = AlignedRows(StreamConfig(tmp_path / "data", seq_length=48, teacher_seq_length=64))
    found = decoded_documents(str(tmp_path / "data"))
    assert len(rows) > 10
    require_reference_rows(rows, [sample["document"] for sample in found])


def test_a_forced_cut_loses_no_token_and_unmaps_what_it_parts(tmp_path):
    bounds = [0, *range(5, 3000, 10), 3000], range(0, 3001, 10)  # none is shared
    student, teacher = (
        Tokens(np.arange(10, 9 + len(own)), np.array(list(pairwise(own)))) for own in bounds
    )
    spans = brute_force_spans(student.byte_offsets, teacher.byte_offsets)
    document = AlignedDocument("odd", "0" * 64, 3000, student, teacher, spans)
    dataset = write_dataset(tmp_path / "data", [document], shard_sizes=[1])
    rows = open_rows(dataset, seq_length=64, teacher_seq_length=512)
    own = rows.datasets[0]
    assert own.plan.num_forced_segments > 3
    assert bool(np.all(own.plan.segments["flags"] & FORCED))
    require_reference_rows(rows, [document])


def test_the_order_is_a_shuffle_by_seed_and_epoch_within_groups(dataset):
    rows = open_rows(dataset, num_epochs=3)
    own = rows.datasets[0]
    size = rows.samples_per_epoch
    epochs = [[own.order.row_index(epoch, place) for place in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(len(own.plan))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    other = open_rows(dataset, seed=1).datasets[0].order
    assert [other.row_index(0, place) for place in range(size)] != epochs[0]
    again = open_rows(dataset).datasets[0].order
    assert [again.row_index(2, place) for place in range(size)] == epochs[2]
    group = np.searchsorted(own.order.group_row_starts, epochs[0], "right")
    assert np.count_nonzero(np.diff(group)) == len(own.order.group_row_starts) - 2


def test_the_order_is_the_one_of_this_release():
    """A changed order would silently break the resuming of every run: raise the plan's FORMAT."""
    order = RowOrder("name", 7, np.array([0, 5, 9]), (range(1), range(1)))
    epochs = [[order.row_index(epoch, place) for place in range(9)] for epoch in range(2)]
    assert epochs == [[2, 4, 1, 0, 3, 7, 5, 6, 8], [2, 4, 3, 1, 0, 7, 8, 5, 6]]


def test_a_run_reads_the_rows_of_this_release(repository, tmp_path):
    """Of a dataset whose files are kept: what its order is named by may not change either."""
    folder = shutil.copytree(repository / "tests/data/golden_v2", tmp_path / "data")
    config = StreamConfig(
        str(folder), seq_length=16, teacher_seq_length=24, num_epochs=2, seed=3, window_rows=4
    )
    rows = AlignedRows(config)
    order, size = rows.datasets[0].order, rows.samples_per_epoch
    found = [[order.row_index(epoch, place) for place in range(size)] for epoch in range(2)]
    assert found == [[1, 2, 5, 6, 3, 0, 4, 7, 8, 9], [6, 8, 4, 7, 1, 3, 0, 2, 9, 5]]
    tokens = rows.__getitems__(range(len(rows)))["input_ids"].numpy().astype("<i4")
    assert sha256(tokens.tobytes()).hexdigest()[:16] == "3837f6f7a2385891"


def test_large_groups_are_divided(dataset, monkeypatch):
    whole = open_rows(dataset, shuffle_shards=3).datasets[0].order
    monkeypatch.setattr("pipeline.packing.order.MAX_GROUP_ROWS", 20)
    divided = open_rows(dataset, shuffle_shards=3).datasets[0].order
    sizes = np.diff(divided.group_row_starts)
    assert len(whole.group_row_starts) == 2
    assert len(sizes) > 2
    assert sizes.max() < 20 + 3 * 6  # a group ends with a window
    num_rows = int(divided.group_row_starts[-1])
    assert sorted(divided.row_index(1, place) for place in range(num_rows)) == list(range(num_rows))


def test_batches_from_workers_stay_valid_while_they_are_kept(dataset):
    rows = open_rows(dataset, global_batch_size=2, num_epochs=3)
    random = torch.get_rng_state()
    kept = list(load_batches(rows, micro_batch_size=2, num_workers=2))
    assert torch.equal(torch.get_rng_state(), random), "a run's own numbers are drawn"
    assert len(kept) == len(rows) // 2 > 50
    for number, batch in enumerate(kept):
        expected = rows.__getitems__([2 * number, 2 * number + 1])
        assert torch.equal(batch.buffer, expected.buffer)


def test_groups_read_a_bounded_set_of_shards(dataset):
    rows = open_rows(dataset)
    own = rows.datasets[0]
    starts = own.plan.shard_document_starts
    for group, shards in enumerate(own.order.group_shards):
        first, last = own.order.group_row_starts[group : group + 2]
        read = own.plan.segments[own.plan.row_starts[first] : own.plan.row_starts[last]]
        needed = set((np.searchsorted(starts, read["document"], "right") - 1).tolist())
        assert needed <= set(shards)


def test_a_batch_is_one_tensor_and_passes_as_one(dataset):
    rows = open_rows(dataset)
    batch = collate_rows([rows[0], rows[1], rows[2]])
    direct = rows.__getitems__([0, 1, 2])
    assert batch.buffer.is_contiguous()
    assert torch.equal(batch.buffer, direct.buffer)
    storage = batch.buffer.untyped_storage().data_ptr()
    for name, tensor in batch.items():
        assert tensor.untyped_storage().data_ptr() == storage, name
        assert tensor.shape[0] == 3
    assert collate_rows(direct) is direct
    assert torch.equal(batch.to("cpu").buffer, batch.buffer)
    assert batch["loss_mask"].dtype == torch.float32
    with pytest.raises(KeyError, match=r"no field 'tokens' but input_ids.*vocag\.collate_rows"):
        batch["tokens"]


def test_rows_of_two_layouts_are_not_mixed(dataset):
    """Buffers of equal size with other fields were stacked, and read by the first row's layout."""
    rows = open_rows(dataset)
    teacher, segments = rows.layout.teacher_seq_length, rows.layout.max_segments
    # Two places less of the teacher's make room for the bounds of two more segments.
    other = replace(rows.layout, teacher_seq_length=teacher - 2, max_segments=segments + 2)
    assert other.num_words == rows.layout.num_words
    with pytest.raises(ValueError, match=f"rows of two layouts in one batch.*={teacher - 2}"):
        collate_rows([rows[0], Rows(rows[1].buffer, other)])


def test_teacher_tokens_with_a_loss_are_those_of_the_text(dataset):
    """Against segments of the plan: padding counts its positions from 0, too."""
    for teacher in (around(None, None, None), around(9, 9, None)):
        rows = open_rows(dataset, teacher=teacher)
        batch = rows.__getitems__(range(len(rows)))
        found = batch.teacher_has_loss
        assert found.dtype == torch.bool
        expected = torch.zeros_like(found)
        for row, bounds in enumerate(batch["teacher_cu_seqlens"].tolist()):
            padding = int((batch["teacher_input_ids"][row] != 0).sum())
            expected[row, :padding] = True
            expected[row, [bound for bound in bounds if bound < padding]] = False
        assert torch.equal(found, expected)
        assert int((batch["teacher_position_ids"] > 0).sum()) > int(found.sum())
        assert torch.equal(rows[3].teacher_has_loss, found[3])


def test_threads_read_what_one_reads(world, monkeypatch):
    """A row's losses were written into another thread's row."""
    rows = stored_rows(world / "data")
    alone = rows.__getitems__(range(len(rows))).buffer
    read = StoredTeachers.read

    def read_and_yield(*given):
        time.sleep(0)  # lets another thread run
        return read(*given)

    monkeypatch.setattr(StoredTeachers, "read", read_and_yield)
    with ThreadPoolExecutor(4) as threads:
        found = [row.buffer for row in threads.map(rows.__getitem__, range(len(rows)))]
    assert torch.equal(torch.stack(found), alone)


def test_samples_past_the_end_are_refused(dataset):
    rows = open_rows(dataset, num_epochs=2)
    assert len(rows) == 2 * rows.samples_per_epoch
    with pytest.raises(IndexError, match=r"raise num_epochs"):
        rows[len(rows)]
    with pytest.raises(IndexError, match=r"row -1 is not in .*: count from the first"):
        rows[-1]
    with pytest.raises(ValueError, match=rf"num_samples {len(rows) + 12} is more than the"):
        load_batches(rows, micro_batch_size=1, num_samples=len(rows) + 12)
    assert len(load_batches(rows, micro_batch_size=1, consumed_samples=len(rows))) == 0
    with pytest.raises(ValueError, match=rf"consumed_samples {len(rows) + 1} is more than the"):
        load_batches(rows, micro_batch_size=1, consumed_samples=len(rows) + 1)


def test_numbers_that_are_too_large_or_none_are_taken_as_said(dataset):
    rows = open_rows(dataset, num_epochs=10**30)
    assert len(rows) > 2**61
    assert torch.equal(rows[torch.tensor(3)].buffer, rows[3].buffer)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        rows[3.0]


def test_too_few_rows_are_refused_before_losses_are_opened(dataset):
    taught = {"teaching": Teaching(stored_losses="nobody"), "with_distributions": True}
    with pytest.raises(DatasetError, match="nothing has scored it"):
        open_rows(dataset, **taught)
    with pytest.raises(ValueError, match=r"has \d+ of the 4096 rows of one global batch: lower"):
        open_rows(dataset, global_batch_size=4096, **taught)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((96, 0, 5, 12, 0, 1), "global_batch_size 12 isn't a multiple of micro_batch_size 5 by 1"),
        ((96, 6, 2, 12, 0, 1), "consumed_samples 6 isn't a multiple of global_batch_size 12"),
        ((95, 0, 2, 12, 0, 1), "num_samples 95 isn't a multiple"),
        ((96, 0, 2, 12, 3, 3), r"replica 3 is not in 0 … 2"),
    ],
)
def test_batches_that_do_not_divide_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ReplicaBatches(*sizes)


def test_lengths_and_workers_that_cannot_be_are_refused(dataset):
    with pytest.raises(ValueError, match="teacher_seq_length 0 is not in 4"):
        open_rows(dataset, teacher_seq_length=0)
    with pytest.raises(ValueError, match="num_workers -1 is below 0"):
        load_batches(open_rows(dataset), micro_batch_size=1, num_workers=-1)


@pytest.mark.slow
def test_processes_that_start_together_share_one_plan(dataset):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        found = pool.map(_sum_of_a_new_plan, [dataset] * 3, chunksize=1)
    assert len(set(found)) == 1
    assert not list((dataset.folder / "plans").glob(".*")), "no temporary folder is left"


def _sum_of_a_new_plan(dataset):
    rows = open_rows(dataset, seq_length=77, teacher_seq_length=99)
    return len(rows), int(rows[0].buffer.sum())
