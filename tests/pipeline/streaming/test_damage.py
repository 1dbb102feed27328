"""Every way a dataset breaks is an error that names place and remedy, or an exact count."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from pipeline.streaming import AlignedRows, Reading, StreamConfig, load_batches
from schemas.document import document_key
from schemas.errors import DamagedSampleError, DamagedShardError, DatasetError, SchemaVersionError
from schemas.index import decode_index
from schemas.manifest import encode_manifest
from tests.support.datasets import edit_sample, flip, record_shard
from tests.support.sample_encoder import encode_document
from tests.support.streaming_data import (
    FIRST_ID,
    make_documents,
    read_quarantine,
    write_dataset,
)

SIZES = (8, 6, 6)


@pytest.fixture
def dataset(tmp_path):
    """Three shards of 8, 6 and 6 documents; document 9 is longer than a row."""
    lengths = [30 + 7 * number for number in range(20)]
    lengths[9] = 300
    return write_dataset(tmp_path / "data", make_documents(lengths), shard_sizes=SIZES)


def open_rows(dataset, **options):
    defaults = {"seq_length": 128, "teacher_seq_length": 200, "window_rows": 4}
    return AlignedRows(StreamConfig(Reading(str(dataset.folder)), **(defaults | options)))


def read_all(rows):
    return rows.__getitems__(range(len(rows)))


def shard_path(dataset, shard):
    return dataset.folder / dataset.manifest.shards[shard].file


def index_of(dataset, shard):
    return decode_index((dataset.folder / dataset.manifest.shards[shard].index_file).read_bytes())


def check_quarantined(dataset, rows, lost):
    """Check that exactly the documents `lost` are masked, and all others are whole."""
    batch = read_all(rows)
    kept = [d for number, d in enumerate(dataset.documents) if number not in lost]
    for name, side in (("input_ids", "student"), ("teacher_input_ids", "teacher")):
        seen = batch[name].flatten().numpy()
        expected = np.concatenate([getattr(document, side).input_ids for document in kept])
        assert np.array_equal(np.sort(seen[seen >= FIRST_ID]), expected)
    with_loss = batch["teacher_input_ids"][batch.teacher_has_loss]
    assert with_loss.min() >= FIRST_ID
    assert len(with_loss) == sum(len(document.teacher) for document in kept)
    num_lost = sum(len(dataset.documents[number].student) for number in lost)
    assert int(batch["num_quarantined_tokens"].sum()) == num_lost > 0
    assert len(rows.datasets[0].damage.samples) == len(lost)
    listed = read_quarantine(rows.datasets[0].damage.file)
    assert sorted(sample.document_id for sample in listed) == sorted(f"doc-{n}" for n in lost)
    assert sum(sample.num_student_tokens for sample in listed) == num_lost
    names = {record.file for record in dataset.manifest.shards}
    assert all(sample.shard in names and sample.reason for sample in listed)
    for sample in listed:
        assert sample.key == document_key(sample.document_id)
    masked = batch["input_ids"] == 0
    assert not bool(batch["loss_mask"][masked].any())
    assert not bool(batch["teacher_spans"][masked].any())


@pytest.mark.parametrize("document", [2, 9, 19])
def test_a_flipped_payload_byte(dataset, document):
    shard = int(np.searchsorted(np.cumsum(SIZES), document, "right"))
    index = index_of(dataset, shard)
    place = document - sum(SIZES[:shard])
    middle = int(index.payload_offset[place] + index.payload_bytes[place] // 2)
    flip(shard_path(dataset, shard), middle)

    with pytest.raises(DamagedSampleError) as caught:
        read_all(open_rows(dataset))
    message = str(caught.value)
    assert index.key[place] in message
    assert dataset.manifest.shards[shard].file in message
    assert "vocag align" in message
    check_quarantined(dataset, open_rows(dataset, on_damage="quarantine"), {document})


@pytest.mark.parametrize("where", ["member boundary", "inside a member", "everything", "missing"])
def test_a_truncated_or_deleted_shard(dataset, where):
    offset = int(index_of(dataset, 1).payload_offset[3])
    size = {"member boundary": offset - 512, "inside a member": offset + 40}.get(where, 0)
    path = shard_path(dataset, 1)
    path.write_bytes(path.read_bytes()[:size])
    message = rf"has {size} bytes, the manifest says \d+: rest"
    if where == "missing":
        path.unlink()
        message = r"000001-of-000003\.tar is missing: restore"
    with pytest.raises(DamagedShardError, match=message):
        open_rows(dataset)
    check_quarantined(dataset, open_rows(dataset, on_damage="quarantine"), set(range(8, 14)))


def test_a_shard_that_is_cut_after_the_start(dataset):
    rows = open_rows(dataset)
    listing = open_rows(dataset, on_damage="quarantine")
    path = shard_path(dataset, 1)
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(DamagedShardError, match=r"the manifest says"):
        read_all(rows)
    check_quarantined(dataset, listing, set(range(8, 14)))


def test_a_shard_listed_twice(dataset):
    shards = dataset.manifest.shards
    for again in (shards[0], replace(shards[0], file="copy.tar", index_file=shards[0].index_file)):
        manifest = replace(dataset.manifest, shards=(*shards, again))
        (dataset.folder / "manifest.json").write_bytes(encode_manifest(manifest))
        with pytest.raises(DatasetError, match=r"lists shard (file|sha256) .* 2 times"):
            open_rows(dataset)


@pytest.mark.parametrize("damage", ["flip", "delete", "swap"])
def test_a_damaged_index_is_an_error_even_under_quarantine(dataset, damage):
    """Without lengths there is no plan, so nothing can be counted exactly."""
    path = dataset.folder / dataset.manifest.shards[1].index_file
    if damage == "flip":
        flip(path, path.stat().st_size // 2)
    elif damage == "delete":
        path.unlink()
    else:
        path.write_bytes((dataset.folder / dataset.manifest.shards[2].index_file).read_bytes())
    with pytest.raises(DamagedShardError, match=r"000001-of-000003\.index\.parquet is"):
        open_rows(dataset, on_damage="quarantine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sample: sample.replace(b'"U8"', b'"I8"'), r"no usable header \('I8'\)"),
        (lambda sample: b"\xff" * 8 + sample[8:], r"no usable header"),
        (lambda sample: sample.replace(b"span.width", b"span.wodth"), r"'span\.width'"),
        (lambda sample: sample[:8] + b"]" + sample[9:], r"no usable header"),
    ],
)
def test_a_sample_whose_header_is_wrong_though_its_hash_is_right(dataset, change, message):
    edit_sample(dataset.folder, 0, 3, change)
    with pytest.raises(DamagedSampleError, match=message):
        read_all(open_rows(dataset))
    check_quarantined(dataset, open_rows(dataset, on_damage="quarantine"), {3})


def test_another_version_of_the_format_is_named(dataset):
    edit_sample(
        dataset.folder,
        0,
        3,
        lambda sample: sample.replace(b'"schema_version":"2"', b'"schema_version":"7"'),
    )
    with pytest.raises(SchemaVersionError, match=r"schema version '7'; this release reads"):
        read_all(open_rows(dataset))


def with_ids(side, *values):
    """Of vocabularies of 2**20."""

    def change(document):
        tokens = getattr(document, side)
        ids = tokens.input_ids.copy()
        ids[5:7] = values
        return replace(document, **{side: replace(tokens, input_ids=ids)})

    return change


def with_long_span(document):
    spans = document.teacher_spans.copy()
    spans[np.flatnonzero(spans[:, 1] > spans[:, 0])[-1], 1] = len(document.teacher) + 1
    return replace(document, teacher_spans=spans)


def with_far_span(document):
    spans = document.teacher_spans.copy()
    spans[-1] = (1 << 31) - 10, (1 << 32) - 20  # an int32 of its end would be negative
    return replace(document, teacher_spans=spans)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_ids("teacher", 1 << 31, 0), "1 token ids are outside the vocabulary"),
        (with_ids("student", (1 << 20) - 1, 1 << 20), "1 token ids are outside the vocabulary"),
        (with_ids("teacher", (1 << 20) - 1, 1 << 20), "1 token ids are outside the vocabulary"),
        (with_long_span, r'\(document "doc-3"\) .* 1 spans leave'),
        (with_far_span, "1 spans leave"),
    ],
)
def test_what_loops_rely_on_is_checked_though_the_hash_is_right(dataset, change, message):
    """Wider numbers don't fit in the sample's place: it moves behind the others."""
    sample = encode_document(change(dataset.documents[3]))
    path, index = shard_path(dataset, 0), index_of(dataset, 0)
    tar = path.read_bytes()
    path.write_bytes(tar + sample)
    columns = {"payload_offset": len(tar), "payload_bytes": len(sample), "crc32": crc32(sample)}
    moved = {name: getattr(index, name).copy() for name in columns}
    for name, value in columns.items():
        moved[name][3] = value
    record_shard(dataset.folder, 0, replace(index, **moved))
    with pytest.raises(DamagedSampleError, match=message):
        read_all(open_rows(dataset))
    check_quarantined(dataset, open_rows(dataset, on_damage="quarantine"), {3})


def test_quarantine_is_counted_across_workers_and_epochs(dataset):
    index = index_of(dataset, 0)
    for place in (1, 4):
        flip(shard_path(dataset, 0), int(index.payload_offset[place]) + 600)
    rows = open_rows(dataset, on_damage="quarantine", num_epochs=2)
    batches = list(load_batches(rows, micro_batch_size=1, num_workers=2))
    num_lost = sum(len(dataset.documents[number].student) for number in (1, 4))
    assert sum(int(batch["num_quarantined_tokens"].sum()) for batch in batches) == 2 * num_lost
    assert len(batches) == len(rows), "damage does not change the number of steps"
    listed = read_quarantine(rows.datasets[0].damage.file)
    assert sorted(sample.document_id for sample in listed) == ["doc-1", "doc-4"]


@pytest.mark.parametrize("change", ["bytes", "version"])
def test_a_worker_s_error_is_that_of_the_run_s_own_process(dataset, change, monkeypatch):
    """DataLoader puts a traceback into the message, and can't make every type of error."""
    if change == "bytes":
        flip(shard_path(dataset, 0), int(index_of(dataset, 0).payload_offset[3]) + 600)
    else:
        monkeypatch.setattr("pipeline.streaming.samples.SAMPLE_VERSION", "3")
    errors = []
    for num_workers in (0, 1):
        with pytest.raises(DatasetError) as raised:
            list(load_batches(open_rows(dataset), micro_batch_size=1, num_workers=num_workers))
        errors.append(raised.value)
    assert type(errors[1]) is type(errors[0])
    assert str(errors[1]) == str(errors[0])
    assert "read_into" in str(errors[1].__cause__), "where it was raised is kept"
